/** The client of the REST API: token, connection state, requests, and polling with backoff. */

import { useEffect, useRef, useState } from "./vendor/htm-preact.js";

const ROOT = "api/v1";
const TOKEN_KEY = "dike-token";
const INTERVAL_MS = 2000;
const MAX_INTERVAL_MS = 15000;
const TIMEOUT_MS = 30000;

/** An error answer; `detail` is the service's message. */
export class ApiError extends Error {
  constructor(status, detail) {
    super(detail);
    this.status = status;
  }
}

const bus = new EventTarget();
const connection = { awaySince: null, refused: "", proxied: false };

function announce(changes) {
  const wasAway = connection.awaySince !== null;
  Object.assign(connection, changes);
  bus.dispatchEvent(new Event("connection"));
  if (wasAway && connection.awaySince === null) bus.dispatchEvent(new Event("wake"));
}

/** Makes all polling views retry immediately. */
export function tryNow() {
  bus.dispatchEvent(new Event("wake"));
}

/** Signs in with the `#token=...` of the address, and removes it from the address bar; `#token=.../VIEW` opens a view. */
export function takeTokenFromAddress() {
  const found = /^#token=([^/]+)(\/.*)?$/.exec(location.hash);
  if (found) {
    history.replaceState(null, "", location.pathname + location.search + (found[2] ? `#${found[2]}` : ""));
    signIn(decodeURIComponent(found[1]));
  }
}

/** Seconds since the epoch; while the service is away, the time it went away. */
export function now() {
  return connection.awaySince ?? Date.now() / 1000;
}

/** Without a token, asks if a proxy has signed us in. */
export async function findProxy() {
  if (token()) return;
  try {
    const response = await fetch("sign-in", { signal: AbortSignal.timeout(TIMEOUT_MS) });
    if (response.ok && (await response.json()).proxy) announce({ proxied: true });
  } catch {
    // The user can still give a token.
  }
}

export function token() {
  return sessionStorage.getItem(TOKEN_KEY);
}

export function signIn(secret) {
  sessionStorage.setItem(TOKEN_KEY, secret.trim());
  announce({ refused: "", proxied: false });
}

export function signOut(reason = "") {
  sessionStorage.removeItem(TOKEN_KEY);
  announce({ refused: reason, proxied: false });
}

/** The connection state; redraws the component when it changes. */
export function useConnection() {
  const [, redraw] = useState(0);
  useEffect(() => {
    const changed = () => redraw((count) => count + 1);
    bus.addEventListener("connection", changed);
    return () => bus.removeEventListener("connection", changed);
  }, []);
  return connection;
}

async function answer(path, options) {
  let response;
  const secret = token();
  // Behind a proxy: against CSRF, as another site's page cannot send this header.
  const ours = secret ? { Authorization: `Bearer ${secret}` } : { "X-Requested-With": "dike" };
  try {
    response = await fetch(`${ROOT}/${path}`, {
      ...options,
      headers: { ...options.headers, ...ours },
    });
  } catch (error) {
    if (error.name !== "AbortError" && connection.awaySince === null) announce({ awaySince: Date.now() / 1000 });
    throw error.name === "AbortError" ? error : new ApiError(0, "The service does not answer.");
  }
  if (connection.awaySince !== null) announce({ awaySince: null });
  if (response.ok) return response;
  const body = await response.json().catch(() => ({}));
  const detail = typeof body.detail === "string" ? body.detail : `The service answered ${response.status}.`;
  if (response.status === 401) {
    const usual = secret
      ? "The service does not know this token."
      : "The proxy does not sign you in any more; load the page again.";
    signOut(response.headers.get("WWW-Authenticate")?.includes("error=") ? detail : usual);
  }
  throw new ApiError(response.status, detail);
}

/** A signal that aborts with the caller's, or after the timeout. */
function withTimeout(signal) {
  return AbortSignal.any([signal, AbortSignal.timeout(TIMEOUT_MS)]);
}

/** GETs JSON; `query` as for URLSearchParams. */
export async function get(path, query, signal) {
  const search = new URLSearchParams(query).toString();
  return (await answer(search ? `${path}?${search}` : path, { signal: withTimeout(signal) })).json();
}

/** GETs a file. */
export async function getBlob(path, query) {
  return (await answer(`${path}?${new URLSearchParams(query)}`, {})).blob();
}

/** GETs lines of JSON. */
export async function getLines(path, query, signal) {
  const headers = { Accept: "application/x-ndjson" };
  const search = new URLSearchParams(query).toString();
  const text = await (await answer(`${path}?${search}`, { headers, signal: withTimeout(signal) })).text();
  return text
    .split("\n")
    .filter((line) => line)
    .map((line) => JSON.parse(line));
}

export async function post(path, body = undefined) {
  return (await answer(path, { method: "POST", body })).json();
}

/**
 * Polls while the component is mounted, the page is visible and `active`.
 *
 * `load(previous, signal)` returns the new value from the previous one (undefined at first); after a failure the
 * previous value stays. A change of `deps` starts anew. Once `active` is false, polls one last time.
 */
export function useLive(load, deps, active = true) {
  const [state, setState] = useState({ data: undefined, error: null });
  const isActive = useRef(active);
  isActive.current = active;
  useEffect(() => {
    const stop = new AbortController();
    let data,
      timer,
      busy = false,
      ended = false,
      delay = INTERVAL_MS;

    async function poll() {
      clearTimeout(timer);
      if (busy || ended || document.hidden || stop.signal.aborted) return;
      busy = true;
      const isLast = !isActive.current;
      try {
        const next = await load(data, stop.signal);
        if (stop.signal.aborted) return;
        delay = INTERVAL_MS;
        ended = isLast;
        data = next;
        setState({ data, error: null });
      } catch (error) {
        if (stop.signal.aborted) return;
        delay = Math.min(2 * delay, MAX_INTERVAL_MS);
        setState({ data, error });
      } finally {
        busy = false;
      }
      if (!ended) timer = setTimeout(poll, delay);
    }

    setState((before) => (before.data === undefined ? before : { data: undefined, error: null }));
    document.addEventListener("visibilitychange", poll);
    bus.addEventListener("wake", poll);
    poll();
    return () => {
      stop.abort();
      clearTimeout(timer);
      document.removeEventListener("visibilitychange", poll);
      bus.removeEventListener("wake", poll);
    };
  }, deps);
  return state;
}
