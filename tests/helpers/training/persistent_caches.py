"""JAX's persistent cache in a directory of a test."""

import contextlib

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def in_directory(directory):
    """Keep every program there, however small, and read none from elsewhere."""
    settings = {
        "jax_compilation_cache_dir": str(directory),
        "jax_persistent_cache_min_compile_time_secs": 0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {key: getattr(jax.config, key) for key in settings}
    for key, value in settings.items():
        jax.config.update(key, value)
    compilation_cache.reset_cache()
    try:
        yield
    finally:
        for key, value in before.items():
            jax.config.update(key, value)
        compilation_cache.reset_cache()


def functions(directory):
    """The names of the jitted functions whose programs are kept."""
    return {path.name.removeprefix("jit_").rsplit("-", 2)[0] for path in directory.glob("*-cache")}
