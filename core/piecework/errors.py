"""Every error that a user of Piecework can cause, one class per stage of a forward."""


class PieceworkError(Exception):
    """Base of all errors raised by Piecework."""


class ConfigError(PieceworkError, ValueError):
    """A setting, an argument or an environment variable is not usable; nothing was changed."""


class PluginError(PieceworkError):
    """A plugin can't be loaded, or answered a hook with something that the hook does not allow."""


class SplitError(PieceworkError):
    """The traced graph can't be cut at the splitting ops that were asked for."""


class CompileError(PieceworkError):
    """A model can't be traced as one graph, or a piece can't be compiled."""


class CaptureError(PieceworkError):
    """A size can't be captured: the device refuses something, or its memory does not suffice."""


class StaleCaptureError(CaptureError):
    """What a captured size reads has moved, and ``freeze`` forbids to capture it again."""


class TraceDepartureError(PieceworkError):
    """A call, or the state of the model, departs from what the one trace assumed."""


class GradientNotSupported(PieceworkError, RuntimeError):
    """A backward reached the outputs of a model compiled for inference."""


class DebugFinding(PieceworkError):
    """Marks what debug mode found, which is raised whatever ``on_failure`` says; each is of a class above, too."""


class PieceworkWarning(UserWarning):
    """Base of all warnings given by Piecework, so that one filter can turn them into errors."""


class PluginWarning(PieceworkWarning):
    """An installed plugin that nobody named can't be used; the others were loaded."""
