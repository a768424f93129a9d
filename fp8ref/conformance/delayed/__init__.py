"""Delayed scaling of any library against a rule of the specification (spec H-13).

subject     somebody's scaling state: functions, or a class
sequences   steps, saves, loads and resets that it is given, one kind of difficulty at a time
reference   the scales that a rule specifies for them
comparison  the first scale that differs, and the simplest sequence that shows it
require     ``require_delayed``, for tests
identify    ``identify_delayed``: which rule it follows
machine     ``DelayedMachine``, hypothesis's state machine, to subclass
"""

from fp8ref.conformance.delayed.comparison import Asked as Asked
from fp8ref.conformance.delayed.identify import identify_delayed as identify_delayed
from fp8ref.conformance.delayed.require import require_delayed as require_delayed
from fp8ref.conformance.delayed.subject import Functions as Functions
from fp8ref.conformance.delayed.subject import of_step as of_step

__all__ = ["Asked", "Functions", "identify_delayed", "of_step", "require_delayed"]
