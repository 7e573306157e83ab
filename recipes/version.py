"""The version of this release, the project's address, and what installs it: what a release changes stands here."""

__version__ = "0.2.0"

ADDRESS = ""
"""Of the project's pages, without a slash at the end. Links of the package's description begin with it.

Empty until there is one.
"""

RELEASED = False
"""Whether `pip install lightning-recipes` finds this project; until then it is installed from its folder."""


def install_command(extra: str) -> str:
    """What installs the packages of an extra, for messages.

    Example:
        >>> install_command("onnx")
        "pip install -e '.[onnx]' in the project's folder"
    """
    if RELEASED:
        return f"pip install 'lightning-recipes[{extra}]'"
    return f"pip install -e '.[{extra}]' in the project's folder"
