"""PDF: the text of its pages, by the package pypdf. Scanned pages have none."""

import io
import logging
from collections.abc import Iterator

from r3lite.core.errors import extra
from r3lite.retrieval.documents.section import Section, Unreadable

MOST = 1 << 26  # bytes of all pages, unpacked: a small file may unpack to any size, which takes memory and hours


def read(content: bytes, name: str) -> Iterator[Section]:
    """One section: sentences go on from page to page. The title is the document's, if it names one."""
    with extra("documents", f"the PDF {name}", "Or take the PDFs out of the folder."):
        import pypdf
    logging.getLogger("pypdf").setLevel(logging.CRITICAL)  # it tells of each flaw that it can read over
    try:
        reader = pypdf.PdfReader(io.BytesIO(content))
        if reader.is_encrypted and not reader.decrypt(""):
            raise Unreadable("a PDF that asks for a password")
        pages, size = [], 0
        for page in reader.pages:
            contents = page.get_contents()
            size += 0 if contents is None else len(contents.get_data())
            if size > MOST:
                raise Unreadable("a PDF of too much content", f"more than {MOST >> 20} MiB when unpacked")
            # A text may hold halves of surrogate pairs.
            pages.append(page.extract_text().encode(errors="replace").decode())
        title = reader.metadata.title if reader.metadata else None
    except Unreadable:
        raise
    except Exception as error:  # a damaged file makes pypdf raise whatever its code runs into, such as KeyError
        raise Unreadable("a damaged PDF", f"{type(error).__name__}: {error}") from error
    yield Section("\n".join(pages), title if isinstance(title, str) else "")
