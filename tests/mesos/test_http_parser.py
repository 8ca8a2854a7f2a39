"""The stand-in for http-parser, on which pymesos reads what a master sends."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from http_parser.http import HttpParser

CHUNKED = (
    b"HTTP/1.1 200 OK\r\n"
    b"Date: Thu, 20 Nov 2025 23:10:00 GMT\r\n"
    b"Transfer-Encoding: chunked\r\n"
    b"Mesos-Stream-Id: 130ae4e3-6b13-4ef4-baa9-9f2e85c3e9af\r\n"
    b"\r\n"
    b'6\r\n7\n{"a"\r\n'
    b"3;extension=1\r\n:1}\r\n"
    b"0\r\n\r\n"
)
CHUNKED_BODY = b'7\n{"a":1}'
PLAIN = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Length: 29\r\nContent-Type: text/plain\r\n\r\nFailed to validate Call: none\n"
)
PLAIN_BODY = b"Failed to validate Call: none"

Feed = Callable[[HttpParser, bytes], bytes]


def in_one_piece(parser: HttpParser, data: bytes) -> bytes:
    assert parser.execute(data, len(data)) == len(data)
    return parser.recv_body()


def byte_by_byte(parser: HttpParser, data: bytes) -> bytes:
    body = b""
    for number in range(len(data)):
        assert parser.execute(data[number : number + 1], 1) == 1
        if parser.is_partial_body():
            body += parser.recv_body()
    return body


either_way = pytest.mark.parametrize("feed", [in_one_piece, byte_by_byte])


@either_way
def test_chunked_body(feed: Feed) -> None:
    parser = HttpParser()
    assert feed(parser, CHUNKED) == CHUNKED_BODY
    assert parser.is_headers_complete()
    assert parser.is_message_complete()
    assert parser.is_chunked()
    assert parser.get_status_code() == 200
    assert parser.get_headers()["Mesos-Stream-Id"] == "130ae4e3-6b13-4ef4-baa9-9f2e85c3e9af"
    assert not parser.is_partial_body()
    assert parser.recv_body() == b""


@either_way
def test_body_of_known_length(feed: Feed) -> None:
    parser = HttpParser()
    assert feed(parser, PLAIN[:-1]) == PLAIN_BODY
    assert parser.is_message_complete()
    assert not parser.is_chunked()
    assert parser.get_status_code() == 400
    assert parser.get_headers() == {"Content-Length": "29", "Content-Type": "text/plain"}


@either_way
def test_headers_come_before_the_body(feed: Feed) -> None:
    parser = HttpParser()
    head, _, _ = CHUNKED.partition(b"\r\n\r\n")
    feed(parser, head)
    assert not parser.is_headers_complete()
    feed(parser, b"\r\n\r\n")
    assert parser.is_headers_complete()
    assert not parser.is_message_complete()
    assert not parser.is_partial_body()
    assert feed(parser, b'6\r\n7\n{"a"\r\n') == b'7\n{"a"'
    assert not parser.is_message_complete()


@either_way
def test_answer_without_a_body(feed: Feed) -> None:
    parser = HttpParser()
    assert feed(parser, b"HTTP/1.1 202 Accepted\r\nContent-Length: 0\r\n\r\n") == b""
    assert parser.get_status_code() == 202
    assert parser.is_message_complete()


def test_only_the_given_length_is_read() -> None:
    parser = HttpParser()
    buffer = CHUNKED + bytes(1000)
    assert parser.execute(buffer, len(CHUNKED)) == len(CHUNKED)
    assert parser.recv_body() == CHUNKED_BODY


@pytest.mark.parametrize(
    "garbage", [b"SSH-2.0-OpenSSH_9.2p1\r\n", b"\x16\x03\x01\x02\x00\x01\x00", b"GET / HTTP/1.1\r\n\r\n"]
)
def test_garbage_is_refused(garbage: bytes) -> None:
    parser = HttpParser()
    assert parser.execute(garbage, len(garbage)) == 0
    assert parser.get_errno()
    assert not parser.is_headers_complete()


def test_garbage_between_chunks_is_refused() -> None:
    parser = HttpParser()
    good, bad = CHUNKED.split(b"3;extension")[0], b"not a length\r\n"
    assert parser.execute(good, len(good)) == len(good)
    assert parser.execute(bad, len(bad)) == 0
    assert parser.get_errno()


def test_nothing_is_known_before_the_first_byte() -> None:
    parser = HttpParser()
    assert parser.get_headers() == {}
    assert not parser.is_headers_complete()
    assert not parser.is_message_complete()
    assert not parser.is_partial_body()
    assert parser.get_errno() == ""
