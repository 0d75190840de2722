"""Packages that only parts of steadynorm need, and how to install them."""

_EXTRAS = {
    "tyro": "report,train",
    "rich": "report,train",
    "plotly": "report",
    "tensorboard": "train",
    "safetensors": "train",
    "PIL": "train",
    "tokenizers": "train",
    "pyarrow": "train",
    "filelock": "train",
}


def remedy(package: str) -> str:
    """Say which command installs a package that an extra brings.

    >>> remedy("safetensors")
    "install it from your checkout of steadynorm: pip install -e '.[train]'"
    """
    return f"install it from your checkout of steadynorm: pip install -e '.[{_EXTRAS[package]}]'"


def describe_missing(error: ImportError) -> str:
    """Return what an ImportError says, and the remedy where an extra brings the module.

    >>> describe_missing(ModuleNotFoundError("No module named 'PIL'", name="PIL.Image"))
    "PIL is not installed; install it from your checkout of steadynorm: pip install -e '.[train]'"
    >>> describe_missing(ImportError("cannot import name 'x'"))
    "cannot import name 'x'"
    """
    package = (error.name or "").partition(".")[0]
    known = isinstance(error, ModuleNotFoundError) and package in _EXTRAS
    return f"{package} is not installed; {remedy(package)}" if known else str(error)
