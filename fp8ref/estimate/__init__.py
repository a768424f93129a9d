"""Estimates of memory, GEMMs, communication and time on H100s and H200s, from shapes and rates.

``dry_run`` prints all of them for ``fp8ref train --dry-run``, and ``report`` the predicted gain for
``fp8ref estimate``. No device, data or framework is needed.
"""

from fp8ref.shared import extras

extras.require("train", "fp8ref.estimate", "pydantic", "rich")
