"""The ``fp8ref`` command.

Exit codes: 0 done; 1 a comparison failed, or a bug of fp8ref; 2 a user's error; 3 a loss that is
not finite; 4 another process of the run was lost; 5 SIGTERM, after the state was saved; 130 Ctrl-C;
141 a closed pipe on standard output; 143 SIGTERM without a state to save.
"""

import argparse
import contextlib
import multiprocessing
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NoReturn

import fp8ref
from fp8ref.commands import (
    checkpoints,
    conform,
    crosscheck,
    data,
    demo,
    listing,
    predict,
    probe,
    runs,
    study,
    supervision,
    train,
    vectors,
)
from fp8ref.commands.shared import DEFECT, ERROR, INTERRUPTED, LOST, NON_FINITE, PIPE, STOPPED
from fp8ref.shared import clauses as specification
from fp8ref.shared import console, extras
from fp8ref.shared.arguments import Parser
from fp8ref.shared.errors import LostProcessError, NonFiniteError, StoppedError
from fp8ref.shared.result import STDOUT

GROUPS = {
    "learn": (demo, study, listing),
    "train": (train, data, runs),
    "predict": (predict,),
    "check, also your own code": (crosscheck, checkpoints, conform, probe, vectors),
}
"""{what a command is for: modules that add commands}, in the order of --help."""

LONGEST = 2000
"""The most characters of a line of an error."""


def run() -> NoReturn:
    """``main`` as a process of its own, which ends with its exit code.

    After Ctrl-C it ends at once: XLA may still compile in a thread, which the interpreter's end
    would crash.
    """
    try:
        code = main()
    except Exception:
        if supervision.is_child():
            traceback.print_exc()
        supervision.report(DEFECT)
        raise
    supervision.report(code)
    if code == INTERRUPTED:
        for child in multiprocessing.active_children():
            child.terminate()
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; arguments are those of the command line, by default this process's.

    Returns the exit code; a user's error is printed.

    Raises:   SystemExit: invalid arguments, --help and --version; any exception of a bug in fp8ref.
    """
    supervised = arguments is None and not supervision.is_child()
    words = sys.argv[1:] if arguments is None else list(arguments)
    namespace, rest = _parser().parse_known_args(words or ["--help"])
    if rest:
        namespace.parser.refuse(rest)
    prog = namespace.parser.prog
    if arguments is None and namespace.timeout is None:
        # of multiprocessing and compilers, which would find modules of any name in the working
        # directory
        os.environ.setdefault("PYTHONSAFEPATH", "1")
    try:
        code = (
            supervision.in_child(namespace.timeout)
            if supervised and namespace.timeout is not None
            else _run(namespace)
        )
        sys.stdout.flush()
    except KeyboardInterrupt as error:
        # whoever reads it may have ended of the same Ctrl-C
        with contextlib.suppress(BrokenPipeError):
            text = (
                f"{prog}: {error}" if str(error) else "interrupted; files written so far are kept"
            )
            print(console.one_line(text), file=sys.stderr, flush=True)
        code = INTERRUPTED
    except BrokenPipeError:  # whoever read what this prints, such as head, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = PIPE
    except Exception as error:
        failed = _code_of(error)
        if failed is None and namespace.leave is None:
            raise
        if failed is None:
            traceback.print_exc()
            code = DEFECT
        else:
            remedy = extras.remedy(error) if isinstance(error, ImportError) else None
            text = _with_names_of_one_line(remedy or str(error), words)
            # all lines but the first are indented: a name of several from a file begins none as
            # fp8ref does
            lines = [*f"{prog}: {text}".split("\n"), *specification.addresses(text)]
            print(console.printable("\n  ".join(map(_shortened, lines))), file=sys.stderr)
            code = failed
    if namespace.leave:
        namespace.leave(code)
    return code


def _with_names_of_one_line(text: str, words: Sequence[str]) -> str:
    """A message in which words of the command line, such as names of files, are of one line."""
    for word in words:
        for name in (word, os.path.normpath(word)):
            text = text.replace(name, console.one_line(name)) if "\n" in name else text
    return text


def _shortened(line: str) -> str:
    """A line that a value of a file, echoed as a whole, does not fill a terminal with."""
    return line if len(line) <= LONGEST else f"{line[: LONGEST // 2]} ... {line[-LONGEST // 2 :]}"


def _run(arguments: argparse.Namespace) -> int:
    """The exit code of a command; what a function raises that is no Exception is no verdict."""
    json_alone = getattr(arguments, "json", None) == STDOUT
    try:
        with contextlib.redirect_stdout(sys.stderr) if json_alone else contextlib.nullcontext():
            return arguments.run(arguments)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if arguments.timeout is None or isinstance(error, Exception):
            raise
        raise ValueError(
            f"the function raised {type(error).__name__}({error}), and there is no verdict. Let "
            "it raise an Exception."
        ) from error


def _parser() -> Parser:
    parser = Parser(prog="fp8ref")
    parser.add_argument("--version", action="version", version=f"fp8ref {fp8ref.__version__}")
    completion = parser.add_argument(
        "--completion",
        action=listing.Completion,
        choices=listing.SHELLS,
        default=argparse.SUPPRESS,
        help="print a script that completes words",
    )
    parser.set_defaults(timeout=None)  # of a command that runs in a child
    parser.set_defaults(leave=None)  # how a process of several ends, given the exit code
    commands = parser.add_subparsers(required=True, metavar="COMMAND", prog="fp8ref")
    parser.rare = [commands, completion]
    lines = ["Train in FP8 with JAX or PyTorch, and check every bit against a simulator."]
    for group, modules in GROUPS.items():
        first = len(commands.choices)
        for module in modules:
            module.add(commands)
        names = list(commands.choices)[first:]
        lines += ["", "", *(f"  {name:12}{commands.choices[name].summary}" for name in names)]
        lines[-len(names) - 1] = f"{group}:"
    parser.describe("COMMAND", "\n".join(lines))
    parser.epilog = "Begin with fp8ref demo. Help on a command: fp8ref COMMAND --help"
    return parser


def _code_of(error: Exception) -> int | None:
    """The exit code of an error that a user can cause.

    None for a bug of fp8ref, which keeps its traceback.
    """
    if isinstance(error, ValueError | OSError | ImportError):
        return ERROR
    codes = {NonFiniteError: NON_FINITE, LostProcessError: LOST, StoppedError: STOPPED}
    return next((code for kind, code in codes.items() if isinstance(error, kind)), None)
