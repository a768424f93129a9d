"""A collective's amax or scale of shards against that of the whole tensor (spec P-27).

inputs      shards of tensors, one kind of difficulty at a time
comparison  the first shards for which a rank's value differs, made as simple as they get
require     ``require_sharded``, for tests
"""

from fp8ref.conformance.sharded.require import require_sharded as require_sharded

__all__ = ["require_sharded"]
