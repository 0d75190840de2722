"""Say how to install packages that only parts of steadynorm need."""

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
    "jax": "jax",
    "optax": "jax",
}


def remedy(package: str) -> str:
    """Return the command that installs a package of an extra.

    >>> remedy("safetensors")
    "install it from your checkout of steadynorm: pip install -e '.[train]'"
    """
    return f"install it from your checkout of steadynorm: pip install -e '.[{_EXTRAS[package]}]'"


def describe_missing(error: ImportError) -> str:
    """Return the message of an ImportError, with the remedy if an extra provides the module.

    >>> describe_missing(ModuleNotFoundError("No module named 'PIL'", name="PIL.Image"))
    "PIL is not installed; install it from your checkout of steadynorm: pip install -e '.[train]'"
    >>> describe_missing(ImportError("cannot import name 'x'"))
    "cannot import name 'x'"
    """
    package = (error.name or "").partition(".")[0]
    has_remedy = isinstance(error, ModuleNotFoundError) and package in _EXTRAS
    return f"{package} is not installed; {remedy(package)}" if has_remedy else str(error)
