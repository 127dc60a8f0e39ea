"""The one exception family of the library.

MixerError(ValueError)      a mixer, model or run was asked for something it cannot do
"""


class MixerError(ValueError):
    """A request that cannot be met. The message says who was asked, what was given, and what would work."""
