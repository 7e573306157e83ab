"""The version of this release, the project's address, and the command that installs it.

Tested in `tests/package/test_release.py`.
"""

__version__ = "0.2.0"

ADDRESS = ""
"""The address of the project's pages, without a slash at the end; links in the package's description begin with it.

It is empty until the project has one.
"""

RELEASED = False
"""Whether `pip install lightning-recipes` finds this project; until then it is installed from its folder."""


def install_command(extra: str) -> str:
    """Return the command that installs the packages of an extra, for messages.

    Example:
        >>> install_command("onnx")
        "pip install -e '.[onnx]' in the project's folder"
    """
    if RELEASED:
        return f"pip install 'lightning-recipes[{extra}]'"
    return f"pip install -e '.[{extra}]' in the project's folder"
