"""PDF: the text of its pages, by the package pypdf. Scanned pages have none.

A page has glyphs and lines, not words: ligatures become letters here, and words that a line's end splits become whole.
"""

import io
import logging
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator

from r3lite.core.errors import extra
from r3lite.retrieval.documents.section import DocumentSection, Unreadable

LARGEST = 1 << 26  # the most bytes of all pages, unpacked: a small file may unpack to any size, and take hours
GLYPHS = re.compile(r"[\ufb00-\ufdff\ufe70-\ufefc]+")  # ligatures and the forms of Arabic letters within a word
WORD = re.compile(r"\w+(?:-\w+)*")
# A word whose second part is in the next line: the parts before and after a hyphen at the end of a line. Possessive
# quantifiers would save steps, but those of Python before 3.11.5 find nothing here (gh-106052).
SPLIT = re.compile(r"(?<![\w-])(\w+(?:-\w+)*)[-\u2010][ \t]*\n[ \t]*(?=(\w+(?:-\w+)*))")
COMPOUND = re.compile(r"(?:half|multi(?!-pl)|non|self|well)-")  # English writes these with a hyphen, mostly
SUSPENDED = {"and", "or", "to", "und", "oder"}  # as in "pre- and post-war"


def read(content: bytes, name: str) -> Iterator[DocumentSection]:
    """Yields one section: sentences go on from page to page. The title is the document's, if it names one.

    Raises Unreadable if the file cannot be read.
    """
    with extra("documents", f"the PDF {name}", "Or take the PDFs out of the folder."):
        import pypdf
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # pypdf logs each flaw that it can read past
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("a PDF that asks for a password")
        pages = []
        size = 0
        for page in reader.pages:
            contents = page.get_contents()
            if contents is not None:
                size += len(contents.get_data())
            if size > LARGEST:
                raise Unreadable("a PDF of too much content", f"more than {LARGEST >> 20} MiB when unpacked")
            # A text may hold halves of surrogate pairs.
            pages.append(page.extract_text().encode(errors="replace").decode())
        title = reader.metadata.title if reader.metadata else None
    except Unreadable:
        raise
    except pypdf.errors.DependencyError as error:  # AES, with which newer programs encrypt, is no part of pypdf
        raise Unreadable("an encrypted PDF that needs the package cryptography", str(error)) from error
    except Exception as error:  # a damaged file makes pypdf raise whatever its code runs into, such as KeyError
        raise Unreadable("a damaged PDF", f"{type(error).__name__}: {error}") from error
    text = "\n".join(pages)
    text = GLYPHS.sub(lambda match: unicodedata.normalize("NFKC", match[0]), text)
    yield DocumentSection(_whole_words(text), title if isinstance(title, str) else "")


def _whole_words(text: str) -> str:
    """Returns the text without line ends in words, and without the hyphens that stood there only for them.

    A PDF does not say whether a hyphen belongs to its word, as in "multi-hop". The spelling that the document has more
    often is taken. If it has both equally often, or neither, the hyphen belongs to the word if the word has another
    hyphen or, before this one, a digit ("20th-century"), if no small letter follows ("Jean-Paul"), or if the word
    begins as compounds do. A hyphen before "and" and the like stays, with a blank after it ("pre- and post-war").
    """
    counts = Counter(WORD.findall(text.casefold()))

    def whole(match: re.Match) -> str:
        first = match[1]
        second = match[2]
        compound = f"{first}-{second}".casefold()
        word = f"{first}{second}".casefold()
        if second in SUSPENDED and not counts[word]:
            return f"{first}- "
        if counts[compound] != counts[word]:
            belongs = counts[compound] > counts[word]
        else:
            is_plain = first.isalpha() and "-" not in second and second[0].islower()
            belongs = not is_plain or bool(COMPOUND.match(compound))
        return f"{first}-" if belongs else first

    return SPLIT.sub(whole, text)
