"""The one exception that means "your input, not our bug"."""


class CloverError(Exception):
    """A problem with what the user gave: a folder, a config, a prompt, a flag.

    The message names the thing, the value, what was expected and what to do. The command line
    prints it after `error:` and exits with code 2; it never shows a traceback for this class.
    """
