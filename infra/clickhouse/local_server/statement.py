"""One SQL statement: what it does, its output format, and where the data of an INSERT begins.

Works on bytes and looks at tokens, never by regular expression: data may be hostile, and a column may be called
`format`. Only the head of an INSERT is tokenized, so a large body costs nothing. This file does not validate SQL;
the engine does.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto

from infra.clickhouse.local_server.errors import NOT_IMPLEMENTED, SYNTAX_ERROR, refusal

MAX_STATEMENT_BYTES = 256 * 1024
"""Longest SQL, data not counted: the real server's `max_query_size`, and a bound on the time that splitting takes."""

READING = frozenset({b"SELECT", b"WITH", b"SHOW", b"DESCRIBE", b"DESC", b"EXPLAIN", b"EXISTS"})
"""First words of statements that change nothing."""

_WORD_START = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_WORD = _WORD_START | frozenset(b"0123456789")
_SPACE = frozenset(b" \t\r\n\f\v")
_QUOTES = frozenset(b"'\"`")


class Kind(Enum):
    """What a token is, as far as splitting needs to know."""

    WORD = auto()
    """A keyword, bare identifier or number."""
    QUOTED = auto()
    """A string, quoted identifier or heredoc."""
    MARK = auto()
    """Any other single byte."""


@dataclass(frozen=True)
class Token:
    """A piece of SQL: text[start:stop]."""

    kind: Kind
    start: int
    stop: int
    text: bytes

    @property
    def upper(self) -> bytes:
        """The word in capitals; empty for what is not a word."""
        return self.text.upper() if self.kind is Kind.WORD else b""


@dataclass(frozen=True)
class Query:
    """A statement without data of its own."""

    text: str
    """The statement, without a closing semicolon."""
    keyword: bytes
    """Its first word, in capitals."""
    format: str | None
    """The output format it asks for."""

    @property
    def reads(self) -> bool:
        """Tell whether it changes nothing, by its first word."""
        return self.keyword in READING


@dataclass(frozen=True)
class Insert:
    """An INSERT whose rows follow it."""

    head: str
    """The statement up to its FORMAT or VALUES."""
    format: str
    """The input format of the rows."""
    data: bytes
    """The rows."""


Statement = Query | Insert


def parse(text: bytes) -> Statement:
    """Split one statement.

    Raises:
        ServerError: there is no statement, more than one, or one of a kind that is not supported.
    """
    tokens = _tokens(text)
    first = next((token for token in tokens if token.text not in (b"(", b";")), None)
    if first is None:
        raise refusal(SYNTAX_ERROR, "Empty query: send SQL in the body or as `query=`")
    if first.upper == b"INSERT":
        return _insert(text, tokens)
    return _query(text, first.upper)


def _insert(text: bytes, tokens: Iterator[Token]) -> Statement:
    """Walk the head of an INSERT until its data, its SELECT or its end."""
    depth = 0
    at_table = True
    after_dot = False
    for token in tokens:
        depth += _nesting(token)
        if depth or token.text == b")":
            if token.upper == b"SELECT" and not at_table:
                return _insert_select(text)
            continue
        word, after_dot = (b"" if after_dot else token.upper), token.text == b"."
        if at_table:
            # The word after INTO [TABLE] [FUNCTION] is a name even if it reads like a keyword.
            at_table = word in {b"INTO", b"TABLE", b"FUNCTION"}
        elif word == b"VALUES":
            return Insert(_decoded(text[: token.start]), "Values", _values(text[token.stop :]))
        elif word == b"FORMAT":
            return _formatted(text, token, tokens)
        elif word in {b"SELECT", b"WITH"}:
            return _insert_select(text)
        elif word == b"INFILE":
            raise refusal(NOT_IMPLEMENTED, "FROM INFILE is not supported: send the rows in the request's body")
    return _query(text, b"INSERT")


def _formatted(text: bytes, keyword: Token, tokens: Iterator[Token]) -> Insert:
    name = next(tokens, None)
    if name is None or name.kind is not Kind.WORD:
        raise refusal(SYNTAX_ERROR, "Syntax error: FORMAT must be followed by the name of an input format")
    return Insert(_decoded(text[: keyword.start]), name.text.decode(), text[_data_start(text, name.stop) :])


def _data_start(text: bytes, position: int) -> int:
    """Data starts after the first newline, or after the blanks if there is none."""
    while position < len(text) and text[position] in b" \t\r\f":
        position += 1
    if position < len(text) and text[position] == ord(";"):
        return _data_start(text, position + 1)
    return position + 1 if text[position : position + 1] == b"\n" else position


def _values(data: bytes) -> bytes:
    # The input format would read a closing semicolon as the start of another row.
    return data.rstrip(b" \t\r\n\f;")


def _insert_select(text: bytes) -> Query:
    """Refuse rows for `input(...)`: the engine reports success and writes none of them."""
    previous = b""
    for token in _tokens(text):
        if previous == b"INPUT" and token.text == b"(":
            raise refusal(
                NOT_IMPLEMENTED,
                "INSERT ... SELECT ... FROM input(...) is not supported: insert into a temporary table first",
            )
        previous = token.upper
    return _query(text, b"INSERT")


def _query(text: bytes, keyword: bytes) -> Query:
    """Find the closing FORMAT of a statement and refuse what would run as two."""
    depth = 0
    end = len(text)
    recent: list[Token] = []
    found: str | None = None
    candidate: str | None = None
    for token in _tokens(text):
        if end != len(text):
            if token.text != b";":
                raise refusal(SYNTAX_ERROR, "Syntax error (Multi-statements are not allowed): send one at a time")
            continue
        depth += _nesting(token)
        if depth == 0 and token.text == b";":
            end = token.start
            continue
        if recent and token.upper == b"OUTFILE" and recent[-1].upper == b"INTO":
            raise refusal(NOT_IMPLEMENTED, "INTO OUTFILE is not supported: the rows come in the response")
        # FORMAT name counts only when the statement, or its SETTINGS, ends there: a column may be called `format`.
        if candidate is not None and token.upper == b"SETTINGS":
            found = candidate
        candidate = _format_name(recent, token) if depth == 0 else None
        recent = [*recent[-1:], token]
    return Query(_decoded(text[:end].strip()), keyword, candidate or found)


def _format_name(recent: list[Token], token: Token) -> str | None:
    if token.kind is not Kind.WORD or not recent or recent[-1].upper != b"FORMAT":
        return None
    before = recent[-2].text.upper() if len(recent) > 1 else b""
    return None if before in {b"AS", b".", b",", b"SELECT"} else token.text.decode()


def _decoded(sql: bytes) -> str:
    try:
        return sql.decode()
    except UnicodeDecodeError as error:
        raise refusal(SYNTAX_ERROR, f"Syntax error: SQL must be UTF-8: {error}") from error


def _nesting(token: Token) -> int:
    if token.kind is not Kind.MARK:
        return 0
    return {b"(": 1, b"[": 1, b"{": 1, b")": -1, b"]": -1, b"}": -1}.get(token.text, 0)


def _tokens(text: bytes) -> Iterator[Token]:
    """Yield the tokens of SQL without blanks and comments."""
    sql = text[:MAX_STATEMENT_BYTES]
    position = 0
    while position < len(sql):
        byte = sql[position]
        if byte in _SPACE:
            position += 1
            continue
        after_comment = _skip_comment(sql, position)
        if after_comment > position:
            position = after_comment
            continue
        kind, stop = _token_end(sql, position, byte)
        yield Token(kind, position, stop, sql[position:stop])
        position = stop
    if len(text) > len(sql):
        raise refusal(SYNTAX_ERROR, f"Max query size exceeded: {MAX_STATEMENT_BYTES} bytes of SQL, data not counted")


def _token_end(text: bytes, position: int, byte: int) -> tuple[Kind, int]:
    if byte in _WORD:
        stop = position + 1
        while stop < len(text) and text[stop] in _WORD:
            stop += 1
        return Kind.WORD, stop
    if byte in _QUOTES:
        return Kind.QUOTED, _quoted_end(text, position, byte)
    if byte == ord("$"):
        return _heredoc_end(text, position)
    return Kind.MARK, position + 1


def _quoted_end(text: bytes, start: int, quote: int) -> int:
    position = start + 1
    while position < len(text):
        if text[position] == ord("\\"):
            position += 2
        elif text[position] != quote:
            position += 1
        elif text[position + 1 : position + 2] == bytes([quote]):
            position += 2
        else:
            return position + 1
    raise refusal(SYNTAX_ERROR, f"Syntax error: the quote opened at byte {start} is not closed")


def _heredoc_end(text: bytes, start: int) -> tuple[Kind, int]:
    name = start + 1
    while name < len(text) and text[name] in _WORD:
        name += 1
    if text[name : name + 1] != b"$":
        return Kind.MARK, start + 1
    tag = text[start : name + 1]
    close = text.find(tag, name + 1)
    return (Kind.QUOTED, close + len(tag)) if close >= 0 else (Kind.MARK, start + 1)


def _skip_comment(text: bytes, position: int) -> int:
    """Return where the comment at *position* ends, or *position* if there is none."""
    if text.startswith((b"--", b"#!", b"# "), position):
        newline = text.find(b"\n", position)
        return len(text) if newline < 0 else newline + 1
    if not text.startswith(b"/*", position):
        return position
    depth, position = 1, position + 2
    while depth:
        opening, closing = text.find(b"/*", position), text.find(b"*/", position)
        if closing < 0:
            raise refusal(SYNTAX_ERROR, "Syntax error: a comment is not closed")
        if 0 <= opening < closing:
            depth, position = depth + 1, opening + 2
        else:
            depth, position = depth - 1, closing + 2
    return position
