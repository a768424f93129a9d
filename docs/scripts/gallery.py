"""Draw the pictures of docs/gallery.md: run each of its blocks, and write its ``figure``.

python docs/scripts/gallery.py                  # all
python docs/scripts/gallery.py --only range     # one
"""

import argparse
import re
from pathlib import Path

from fp8ref import plots

PAGE = Path(__file__).parents[1] / "gallery.md"
BLOCK = re.compile(r"^!\[[^\]]+\]\(gallery/([\w-]+)\.png\)\n\n```py\n(.*?)^```", re.DOTALL | re.M)


def blocks() -> dict[str, str]:
    """{picture: the code under it}, in the order of the page."""
    return dict(BLOCK.findall(PAGE.read_text(encoding="utf-8")))


def picture(name: str, code: str) -> bytes:
    """The PNG of the ``figure`` that a block leaves."""
    names: dict = {}
    exec(compile(code, f"<{name}>", "exec"), names)
    return plots.png(names["figure"])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=list(blocks()), help="one picture instead of all")
    only = parser.parse_args().only
    for name, code in blocks().items():
        if only in (None, name):
            path = PAGE.with_name("gallery") / f"{name}.png"
            path.write_bytes(picture(name, code))
            print(f"wrote {path}, {path.stat().st_size:,} bytes")
