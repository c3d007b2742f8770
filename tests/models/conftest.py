import support.no_compiler  # noqa: F401
