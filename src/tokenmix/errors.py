"""Define the only exception class of the library: ``MixerError``, a ``ValueError``."""


class MixerError(ValueError):
    """A request to a mixer, model or run that it cannot meet. The message says who was asked, what was given, and what
    would work."""
