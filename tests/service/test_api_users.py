"""Authentication by a token or by a proxy, and the limits of each user."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.requests import Request

from dike.exceptions import BadInputError
from framework.scheduler.records import JobState
from framework.service.api.backend import Proxy
from framework.service.api.client import ServiceClient
from framework.service.users import Users
from tests.search.stored_search import SPEC
from tests.service.api_stage import DEADLINE_S, TOKENS, ApiStage, api_stage, bundle, form, training, users_file

pytestmark = pytest.mark.integration

EXPIRED = "a-token-that-was-good-once"
HEADER = "X-Forwarded-User"
PROXY = "127.0.0.2"
MORE = f"""
carol: {{no_token: true}}
jürgen: {{no_token: true}}
dan: {{token_sha256: {hashlib.sha256(EXPIRED.encode()).hexdigest()}, expires: 2001-02-03}}
"""


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiStage]:
    folder = tmp_path_factory.mktemp("service")
    users = Users.of_file(users_file(folder, MORE))
    with api_stage(folder, users=users, proxy=Proxy.of(HEADER, ["10.0.0.0/28", PROXY])) as running:
        yield running


@pytest.fixture(scope="module")
def proxy(stage: ApiStage) -> Iterator[httpx.Client]:
    """What the proxy sends on: from its own address, without a token."""
    transport = httpx.HTTPTransport(local_address=PROXY)
    with httpx.Client(base_url=stage.url, transport=transport, timeout=DEADLINE_S) as client:
        yield client


@pytest.fixture(scope="module")
def elsewhere(stage: ApiStage) -> Iterator[httpx.Client]:
    with stage.client(None) as client:
        yield client


def as_user(name: str, **more: str) -> dict[str, str]:
    """What the proxy adds, and headers of the browser."""
    return {HEADER: name, **{key.replace("_", "-"): value for key, value in more.items()}}


OWN = {"X_Requested_With": "dike", "Sec_Fetch_Site": "same-origin"}


def detail(answer: httpx.Response, status: int) -> str:
    assert answer.status_code == status, answer.text
    return str(answer.json()["detail"])


def test_a_token_that_has_expired_is_refused_with_a_sentence_of_its_own(stage: ApiStage) -> None:
    sentence = "This token was valid until 2001-02-03; the service's operator gives dan a new one."
    with stage.client(None) as client:
        answer = client.get("/api/v1/me", headers={"Authorization": f"Bearer {EXPIRED}"})
        assert detail(answer, 401) == sentence
        # The page and the commands distinguish it from an unknown token.
        assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    with ServiceClient(stage.url, EXPIRED) as asking, pytest.raises(BadInputError) as raised:
        asking.me()
    assert str(raised.value) == sentence
    with (
        ServiceClient(stage.url, EXPIRED[:-1]) as asking,
        pytest.raises(BadInputError, match="does not know this token"),
    ):
        asking.me()


def test_a_proxy_says_who_somebody_is(stage: ApiStage, proxy: httpx.Client) -> None:
    for name, is_admin in (("carol", False), ("alice", False), ("root", True)):
        headers = as_user(name, Sec_Fetch_Site="same-origin")
        assert proxy.get("/api/v1/me", headers=headers).json() == {"user": name, "admin": is_admin, "read_only": False}
    assert proxy.get("/sign-in", headers=as_user("carol")).json() == {"proxy": True}
    assert proxy.get("/api/v1/me", headers=[(HEADER, "jürgen".encode())]).json()["user"] == "jürgen"
    submitted = proxy.post("/api/v1/jobs", files=form(training()), headers=as_user("carol", **OWN))
    assert (submitted.status_code, submitted.json()["user"]) == (201, "carol")


@pytest.mark.parametrize("name", ["mallory", "carol, root", "", "CAROL", "None"])
def test_whom_the_users_file_does_not_have_is_not_let_in(proxy: httpx.Client, name: str) -> None:
    answer = proxy.get("/api/v1/me", headers=as_user(name))
    if name:
        assert f"The proxy signed in '{name}', an unknown user" in detail(answer, 401)
        assert answer.headers["www-authenticate"] == 'Bearer error="invalid_token"'
    else:
        # The proxy has let a user through without a name.
        assert "There is no token" in detail(answer, 401)


def test_a_proxy_that_hands_on_what_it_is_sent_is_not_believed(proxy: httpx.Client) -> None:
    for names in (("root", "carol"), ("root", "")):
        answer = proxy.get("/api/v1/me", headers=[(HEADER, name) for name in names])
        assert "came 2 times; the proxy must replace those that clients send" in detail(answer, 401)


def test_from_elsewhere_the_header_means_nothing(stage: ApiStage, proxy: httpx.Client, elsewhere: httpx.Client) -> None:
    for more in ({}, {"X-Forwarded-For": PROXY}, {"Forwarded": f"for={PROXY}"}, {"X-Real-IP": PROXY}):
        answer = elsewhere.get("/api/v1/me", headers={**as_user("root", **OWN), **more})
        assert "There is no token" in detail(answer, 401)
        assert answer.headers["www-authenticate"] == "Bearer"
    assert elsewhere.get("/sign-in", headers=as_user("root")).json() == {"proxy": False}
    # Another header does not do, nor one that some servers take for the same.
    for header in ("X-Forwarded-Email", "X_Forwarded_User", "Remote-User"):
        assert proxy.get("/api/v1/me", headers={header: "root"}).status_code == 401
    assert proxy.get("/sign-in").json() == {"proxy": False}


def test_a_token_counts_before_what_the_proxy_says(proxy: httpx.Client, elsewhere: httpx.Client) -> None:
    token = {"Authorization": f"Bearer {TOKENS['alice']}"}
    for client in (proxy, elsewhere):
        assert client.get("/api/v1/me", headers={**token, **as_user("root")}).json()["user"] == "alice"
    wrong = {"Authorization": "Bearer wrong", **as_user("root")}
    assert "This token is unknown" in detail(proxy.get("/api/v1/me", headers=wrong), 401)
    # What proxies add of their own is none.
    basic = {"Authorization": "Basic cm9vdDo=", **as_user("carol")}
    assert proxy.get("/api/v1/me", headers=basic).json()["user"] == "carol"


@pytest.mark.parametrize("site", ["cross-site", "same-site", "none", "rubbish"])
def test_another_site_s_page_changes_nothing_by_a_proxy_s_cookie(
    stage: ApiStage, proxy: httpx.Client, site: str
) -> None:
    before = len(stage.store.jobs())
    path = f"/api/v1/jobs/{stage.submit('alice')}"
    # Requests that a form of another site can make a browser send, with the user's sign-in at the proxy.
    for headers in (
        as_user("alice"),
        as_user("alice", Sec_Fetch_Site=site),
        as_user("alice", **{**OWN, "Sec_Fetch_Site": site}),
    ):
        assert detail(proxy.post("/api/v1/jobs", files=form(training()), headers=headers), 403)
        for wish in ("kill", "again", "resume"):
            assert detail(proxy.post(f"{path}/{wish}", headers=headers), 403).startswith("Users signed in by a proxy ")
    assert len(stage.store.jobs()) == before + 1
    record = stage.store.job(path.rpartition("/")[2])
    assert record is not None
    assert not record.kill_requested
    # Other sites' pages may not read either, although a browser would hide the answer. A typed address is answered.
    asked = proxy.get(path, headers=as_user("alice", Sec_Fetch_Site=site))
    assert asked.status_code == (200 if site == "none" else 403)
    # A browser's preflight asks whether it may send the header; the answer does not allow it.
    wanted = {"Origin": "https://evil.example", "Access-Control-Request-Method": "POST"}
    preflight = proxy.options(f"{path}/kill", headers={**wanted, "Access-Control-Request-Headers": "x-requested-with"})
    assert preflight.status_code == 405
    assert not [name for name in preflight.headers if name.startswith("access-control")]
    # The service's own page does it.
    assert proxy.post(f"{path}/kill", headers=as_user("alice", **OWN)).status_code == 202


def test_whom_a_token_signs_in_needs_no_other_header(stage: ApiStage) -> None:
    job_id = stage.submit("alice")
    with stage.client("alice") as client:
        answer = client.post(f"/api/v1/jobs/{job_id}/kill", headers={"Sec-Fetch-Site": "cross-site"})
    assert answer.status_code == 202


@pytest.mark.parametrize(
    ("peer", "is_proxy"),
    [
        ("10.0.0.5", True),
        ("10.0.0.16", False),
        # IPv4 clients, as an IPv6 socket names them, and neighbors.
        ("::ffff:10.0.0.5", True),
        ("::ffff:10.0.0.16", False),
        ("fd00::1", True),
        ("fe80::1%eth0", False),
        (None, False),
    ],
)
def test_a_proxy_is_known_by_its_address(peer: str | None, is_proxy: bool) -> None:
    client = None if peer is None else (peer, 1)
    scope = {"type": "http", "client": client, "headers": [(HEADER.lower().encode(), b"ann")]}
    assert Proxy.of(HEADER, ["10.0.0.0/28", "fd00::/64"]).has_sent(Request(scope)) is is_proxy


@pytest.mark.parametrize("header", ["", "X Forwarded", "X_Forwarded_User", "Remote-User:", "Benutzer-ä"])
def test_what_is_no_header_is_refused(header: str) -> None:
    with pytest.raises(BadInputError, match="is not a valid header name; use letters, digits and '-'"):
        Proxy.of(header, ["10.0.0.5"])


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("proxy.example.org", "is neither an address nor a network; write 10.0.0.5 or 10.0.0.0/28"),
        ("10.0.0.5/24", "is neither an address nor a network"),
        ("", "is neither an address nor a network"),
        ("0.0.0.0/0", "matches every address; give the proxy's own address"),
        ("::/0", "matches every address"),
    ],
)
def test_what_is_no_proxy_s_address_is_refused(address: str, said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        Proxy.of(HEADER, ["10.0.0.5", address])


def search(name: str, trials: int) -> dict[str, Any]:
    spec = dataclasses.replace(SPEC, name=name, script="train.py", sampler="random", trial_count=trials)
    return {"kind": "search", "spec": dataclasses.asdict(spec)}


def test_a_submission_over_a_limit_is_refused(tmp_path: Path) -> None:
    limits = f"{{open_jobs: 2, trials: 5, bundles: {3 * len(bundle())}}}"
    path = users_file(tmp_path)
    path.write_text(path.read_text().replace("admin: false}", f"admin: false, limits: {limits}}}", 1))
    users = Users.of_file(path)
    with api_stage(tmp_path, users=users) as stage, stage.client("alice") as alice, stage.client("root") as root:

        def sent(request: dict[str, Any]) -> httpx.Response:
            return alice.post("/api/v1/jobs", files=form(request))

        assert detail(sent(search("large", 6)), 403) == (
            "The limit of trials in a search that the service's operator has set for alice is 5, and this one has 6; "
            "search with fewer, or ask for more."
        )
        assert stage.store.job("large") is None
        assert sent(search("small", 5)).status_code == 201
        first = stage.submit("alice")
        over = "The limit of open jobs that the service's operator has set for alice is 2, and 2 are open; "
        assert detail(sent(training()), 403).startswith(over)
        assert detail(alice.post(f"/api/v1/jobs/{first}/again"), 403).startswith(over)
        # To others it is no matter.
        stage.submit("bob")
        for name in ("small", first):
            alice.post(f"/api/v1/jobs/{name}/kill")
            stage.wait_for_state(name, JobState.KILLED)
        again = alice.post(f"/api/v1/jobs/{first}/again").json()["id"]
        assert "The limit of bundles" in detail(sent(training()), 403)
        # It counts as its user's search, even if another user resumes it.
        assert alice.post("/api/v1/jobs/small/resume").status_code == 200
        for name in ("small", again):
            alice.post(f"/api/v1/jobs/{name}/kill")
            stage.wait_for_state(name, JobState.KILLED)
        path.write_text(path.read_text().replace("open_jobs: 2", "open_jobs: 0"))
        users.reload()
        assert "is 0, and 0 are open" in detail(root.post("/api/v1/jobs/small/resume"), 403)
