"""Settings of the retriever, of procedures, and of building an index."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from r3lite.core.config import Basic, Bounds, Fraction, InputPath, OfIndex, OfRun, Section, name_and_path
from r3lite.core.errors import UsageError, nearest
from r3lite.core.needs import Needs, NeedsOthers
from r3lite.settings.addresses import SERVICES, check_address, collection_server, is_server
from r3lite.settings.common import budget_bytes
from r3lite.settings.conditions import (
    chooses_procedure,
    describes_procedures,
    encodes_with_model,
    has_documents,
    has_search,
    has_steps,
    reads_paragraphs,
    searches_by_graph,
)

SOURCES = ("General", "News", "Academic")  # the kinds of sources that a plan of searches (--format dag) can name
RETRIEVERS = ("semantic", "lexical", "hybrid", "golden", "none")
BUILD = "python -m r3lite.index --documents FOLDER (or --corpus FILE.jsonl)"  # the command that makes an index
INDEX = InputPath("folder", f"Build one in a new folder: {BUILD} --output FOLDER")
INDEX_OF_SOURCE = replace(INDEX, is_name=is_server, has_names=True)
PASSAGES = InputPath(remedy="Pass a JSONL file of passages: id, title and text.")
DOCUMENTS = InputPath("folder", "Pass a folder of documents, or passages in a JSONL file as --corpus.")
ADDITION = InputPath("file or folder", "Pass a JSONL file of passages or a folder of documents.")
CONDITION = re.compile(r"([\w.-]+)\s*(>=|<=|!=|=|>|<)\s*([^\s=<>].*)")  # of --filter


class EncoderSettings(Section):
    """Encoder."""

    needs: ClassVar = (
        NeedsOthers("encoder_style", "a retriever that uses an --encoder other than hashing", encodes_with_model),
        NeedsOthers(
            "encoder_dtype",
            "a retriever that uses an --encoder other than hashing, or a local --rerank",
            lambda s: encodes_with_model(s) or (s.rerank and "://" not in s.rerank),
        ),
    )

    encoder: Basic[OfIndex[str]] = "intfloat/e5-base-v2"
    """text encoder: folder, hub id, or hashing. BERT, RoBERTa and XLM-R are built in; other
    sentence-transformers models need the extra encoders; hashing is TF-IDF on hashed words"""
    encoder_style: Literal["auto", "own", "e5", "e5-instruct", "plain"] = "auto"
    """own: the prompts in the encoder's files; e5: query/passage prefixes; e5-instruct: an instruction before queries;
    plain: no prefixes; auto: own if the files have prompts, else e5 or e5-instruct if the encoder's name contains e5
    (and instruct), else plain"""
    encoder_dtype: Literal["fp32", "bf16"] = "fp32"
    """precision of the encoder and of --rerank; bf16 halves the memory and is faster on hardware that supports it.
    Vectors differ by a few thousandths, so an index built in one can be searched in the other"""


class RetrievalSettings(EncoderSettings):
    """Retrieval."""

    # --encoder and --top-k are left out: users may keep them while they compare retrievers and baselines.
    needs: ClassVar = (
        *EncoderSettings.needs,
        NeedsOthers(
            "retriever",
            "a --format and a --baseline that retrieve documents",
            lambda s: s.retriever == "none" or (has_documents(s) and s.baseline != "gold"),
        ),
        NeedsOthers(
            "",
            "a --retriever other than golden and none, and a --format and a --baseline that search",
            has_search,
            but="retriever top_k noise_rate encoder encoder_style encoder_dtype",
        ),
        NeedsOthers(
            "noise_rate",
            "the paragraphs of the questions, without --corpus, --index, a server or the web",
            reads_paragraphs,
        ),
        NeedsOthers("query_cache", "a retriever that uses an --encoder other than hashing", encodes_with_model),
        NeedsOthers("source_index", "--format dag or --search-graph", searches_by_graph),
        Needs("context corpus index filter", "a --retriever that searches local passages", lambda s: s.has_passages),
        Needs("corpus index filter source_index", "--context corpus", lambda s: s.context != "question"),
        Needs("fusion", "--retriever hybrid", lambda s: s.retriever == "hybrid"),
        Needs(
            "lexical_weight",
            "--retriever hybrid --fusion weighted",
            lambda s: s.retriever == "hybrid" and s.fusion == "weighted",
        ),
        Needs(
            "web_results web_rpm web_cache web_replay",
            "web search: exa or duckduckgo",
            lambda s: s.is_web or any(settings.is_web for settings in s.by_kind.values()),
        ),
        Needs("query_cache_mib", "--query-cache", lambda s: s.query_cache),
    )

    retriever: Basic[str] = "semantic"
    """semantic, lexical, hybrid, golden, none, exa, duckduckgo, or a server's address. semantic: nearest passages by
    embedding; lexical: BM25 (extra retrieval); hybrid: both, fused; golden: the question's gold paragraphs, for any
    query; none; exa, duckduckgo (extra web): web search; http://...: the /retrieve endpoint of a server;
    qdrant://host:6333/collection: a Qdrant collection (extra qdrant)"""
    context: Literal["corpus", "question"] = "corpus"
    """corpus: search all passages; question: only the paragraphs that come with the question"""
    corpus: Basic[Annotated[str | None, PASSAGES]] = None
    """JSONL file of passages (id, title, text). It is indexed at the start. Default: the paragraphs that come with
    --data"""
    index: Basic[Annotated[str | None, INDEX]] = None
    """index folder built by `python -m r3lite.index`"""
    top_k: Basic[OfRun[Annotated[int, Bounds(low=1, high=1000)]]] = 5
    """passages per query. golden returns all gold paragraphs"""
    fusion: Literal["rrf", "weighted"] = "rrf"
    """how to fuse the first 100 of both rankings; rrf: reciprocal ranks, k = 60; weighted: scores in 0..1 (hybrid)"""
    lexical_weight: Fraction = 0.5
    """weight of the lexical score; the semantic score has the rest (hybrid, weighted)"""
    rerank: str | None = None
    """BERT cross-encoder that picks --top-k from 3 times as many passages: folder or hub id; auto:
    cross-encoder/ms-marco-MiniLM-L-6-v2; http://...: the /rerank endpoint of a server"""
    filter: tuple[str, ...] | None = None
    """search only passages that match, such as 'lang=en,year>=2020,id=notes/*'; fields are id, title, and those under
    "metadata" in the corpus; operators are =, != (* matches any text), >=, <=, > and <"""
    query_cache: str | None = None
    """file that caches query vectors; runs can share it"""
    query_cache_mib: Annotated[int, Bounds(low=1, high=1 << 20)] = 256
    """maximum size of --query-cache in MiB; the oldest vectors are deleted first"""
    source_index: Annotated[tuple[str, ...] | None, INDEX_OF_SOURCE] = None
    """retriever for each kind of source that a plan names (--format dag), comma-separated, such as News=news-index; an
    index folder, an address, exa or duckduckgo; kinds are General, News and Academic; the others use --retriever"""
    web_results: Annotated[int, Bounds(low=1, high=100)] = 20
    """pages per web search; the sentences nearest to the query become --top-k passages"""
    web_rpm: Annotated[int, Bounds(low=1, high=100_000)] = 60
    """maximum web searches per minute"""
    web_cache: str = "~/.cache/r3lite/web"
    """folder that caches web results; a cached query is not sent again"""
    web_replay: bool = False
    """use only cached web results, for the same documents as before, without network"""
    noise_rate: Fraction | None = None
    """share of each question's other paragraphs that are kept with the gold ones, sampled with --seed; golden mixes
    them in random order (default 0), semantic, lexical and hybrid search them if there is no corpus (default 1)"""

    @property
    def from_questions(self) -> bool:
        """Tells whether documents come from the paragraphs of the questions and not from a corpus of their own."""
        if self.retriever == "golden":
            return True
        return self.has_passages and not (self.corpus or self.index)

    @property
    def is_remote(self) -> bool:
        """Tells whether documents come from a server."""
        return "://" in self.retriever

    @property
    def is_web(self) -> bool:
        """Tells whether documents come from a search of the web."""
        return self.retriever in SERVICES

    @property
    def has_passages(self) -> bool:
        """Tells whether the passages are on this machine, and not on a server or the web."""
        return not (self.is_remote or self.is_web)

    @property
    def is_collection(self) -> bool:
        """Tells whether documents come from a Qdrant collection. Its queries are encoded here."""
        return collection_server(self.retriever) is not None

    @property
    def by_kind(self) -> "dict[str, RetrievalSettings]":
        """Returns the settings of the retriever of each kind of source that --source-index names."""
        by_source: dict[str, RetrievalSettings] = {}
        for source, place in map(name_and_path, self.source_index or ()):
            # --query-cache is unset, too, as these retrievers use the cache of the retriever of this section.
            unset = ("corpus", "index", "source_index", "noise_rate", "query_cache")
            changes: dict[str, str | None] = dict.fromkeys(unset)
            if is_server(place):
                changes["retriever"] = place
            else:
                changes["index"] = place
                if not self.has_passages:
                    changes["retriever"] = "semantic"
            by_source[source] = replace(self, **changes)
        return by_source

    def check(self) -> None:
        self._check_sources()
        self._check_retriever()
        for text in self.filter or ():
            if not CONDITION.fullmatch(text.strip()):
                raise UsageError(f"--filter {text}: write it as lang=en or year>=2020, in quotes", code="filter-form")
        if self.rerank and "://" in self.rerank:
            check_address("the address of --rerank", self.rerank, "http://host:8000/rerank")

    def _check_sources(self) -> None:
        entries = self.source_index or ()
        for entry in entries:
            source, place = name_and_path(entry)
            if source not in SOURCES or not place:
                raise UsageError(
                    f"--source-index {entry}: write it as News=FOLDER; kinds are {', '.join(SOURCES)}",
                    code="source-index-form",
                )
        if len(self.by_kind) < len(entries):
            raise UsageError("--source-index has a kind of source twice", code="source-index-twice")
        for settings in self.by_kind.values():
            settings.check()

    def _check_retriever(self) -> None:
        names = (*RETRIEVERS, *SERVICES)
        if self.is_remote:
            address = collection_server(self.retriever) or self.retriever
            example = "http://host:8000/retrieve or qdrant://host:6333/collection"
            check_address("the address of --retriever", address, example)
            if self.is_collection and self.encoder == "hashing":
                raise UsageError("--encoder hashing does not work with Qdrant: pass a BERT", code="hashing-with-qdrant")
        elif self.is_web and self.top_k > self.web_results:
            raise UsageError(
                f"--top-k is {self.top_k}; it must be at most --web-results, {self.web_results}", code="web-top-k"
            )
        elif self.retriever not in names:
            remedy = f"choose from {', '.join(names)}, or pass the address of a server"
            raise UsageError(
                f"retriever is {self.retriever!r}; {remedy}{nearest(self.retriever, names)}", code="unknown-retriever"
            )


class ProcedureSettings(Section):
    """Procedures."""

    needs: ClassVar = (
        NeedsOthers("procedures_by", "--procedures", chooses_procedure),
        NeedsOthers("procedures_floor", "--procedures with --procedures-by both", describes_procedures),
        NeedsOthers("", "a --baseline with steps", has_steps),
    )

    # No remedy, so that a missing file is no error here: `procedures --add` creates it.
    procedures: Annotated[str | None, InputPath("file or folder")] = None
    """JSON file of procedures (name, description, trigger, category, priority, steps), or a folder of such files; the
    best match for a question, if there is one, is inserted before it"""
    procedures_by: Literal["both", "triggers"] = "both"
    """how a procedure matches: triggers: by its trigger words in the question; both: or by its description"""
    procedures_floor: Annotated[float, Bounds(low=-1.0, high=1.0)] = 0.85
    """minimum cosine similarity of question and description; `python -m r3lite.procedures --match` shows it"""


class IndexSettings(EncoderSettings):
    """Index."""

    needs: ClassVar = (
        *EncoderSettings.needs,
        NeedsOthers(
            "index_type memory_budget",
            "a new index in a folder, without --add and --delete",
            lambda s: not (s.add or s.delete or collection_server(s.output or "")),
        ),
        Needs("batch_size", "an --encoder other than hashing", lambda s: s.encoder != "hashing"),
        Needs("skip_bad_rows", "a JSONL file: --corpus or --add", lambda s: s.corpus or s.add),
    )

    documents: Basic[Annotated[str | None, DOCUMENTS]] = None
    """folder of your own documents, and its subfolders: text, JSON, JSONL, CSV, TSV, Python; with extra documents
    Markdown, HTML, PDF"""
    corpus: Basic[Annotated[tuple[str, ...] | None, PASSAGES]] = None
    """instead of --documents, a JSONL file of passages (id, title, text), or several, A.jsonl,B.jsonl, for one index"""
    add: Basic[Annotated[str | None, ADDITION]] = None
    """passages to add to the index in --output: a JSONL file or a folder of documents; known passages are skipped"""
    delete: Basic[tuple[str, ...] | None] = None
    """ids of passages to delete from the index in --output before --add: A,B or @FILE with one id per line"""
    index_type: Basic[Literal["auto", "flat", "sq8", "hnsw", "ivf-sq8", "opq-ivf-pq"]] = "auto"
    """kind of index. flat: exact; sq8: 8 bits per dimension; hnsw: graph, fast and large; ivf-sq8, opq-ivf-pq: a query
    reads part of the index, and opq-ivf-pq is the smallest; auto: the first of flat, sq8, ivf-sq8, opq-ivf-pq that fits
    --memory-budget, but flat and sq8 only up to a million passages"""
    memory_budget: str = "4GiB"
    """maximum memory of the index, such as 4GiB or 900MiB, during building and searching, without the encoder"""
    batch_size: Annotated[int, Bounds(low=1, high=1 << 16)] = 64
    """passages encoded together"""
    device: Basic[Literal["auto", "cpu", "cuda", "mps"]] = "auto"
    """device that encodes the passages; auto: cuda if available, else mps, else cpu"""
    skip_bad_rows: bool = False
    """skip and count malformed passages in --corpus instead of stopping at the first"""

    @property
    def edits(self) -> bool:
        """Tells whether an existing index is changed, instead of a new one built."""
        return bool(self.add or self.delete)

    def check(self) -> None:
        if self.documents and self.corpus:
            raise UsageError("--documents and --corpus cannot be combined: remove one", code="documents-and-corpus")
        if self.edits and (self.documents or self.corpus):
            surplus = "--documents" if self.documents else "--corpus"
            raise UsageError(f"--add and --delete edit an existing index: remove {surplus}", code="edit-with-build")
        budget_bytes(self.memory_budget, "--memory-budget")


class DocumentSettings(Section):
    """How --documents become passages."""

    needs: ClassVar = (
        NeedsOthers(
            "",
            "--documents, or a folder in --add; JSONL passages are not split",
            lambda s: s.documents or (s.add and Path(s.add).is_dir()),
        ),
    )

    chunk_tokens: Basic[Annotated[int, Bounds(low=16, high=8192)]] = 128
    """maximum tokens of a passage with its title. A token is a punctuation mark or up to 5 letters of a word"""
    chunk_overlap: Annotated[int, Bounds(low=0, high=4096)] = 24
    """maximum tokens, in whole sentences, that a passage repeats from the previous one"""
    max_file_mib: Annotated[int, Bounds(low=1, high=256)] = 32
    """skip larger files"""

    def check(self) -> None:
        if self.chunk_overlap > self.chunk_tokens // 2:
            raise UsageError(
                f"--chunk-overlap is {self.chunk_overlap}; it must be at most half of --chunk-tokens",
                code="chunk-overlap",
            )
