"""What is raised for a configuration that cannot work."""

__all__ = ["ConfigError"]


class ConfigError(ValueError):
    """A configuration that cannot work; the text names every problem and what to do."""
