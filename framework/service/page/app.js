/** The page: sign-in, header, and routing between views. */

import { html, render, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { findProxy, get, signIn, signOut, takeTokenFromAddress, token, tryNow, useConnection, useLive } from "./api.js";
import { ClusterView } from "./cluster.js";
import { Clock, share } from "./format.js";
import { JobView } from "./job.js";
import { JobsView } from "./jobs.js";
import { Bar } from "./parts.js";
import { SubmitView } from "./submit.js";

const VIEWS = [
  ["", "Jobs"],
  ["cluster", "Cluster"],
  ["submit", "Submit"],
];
const SHOWN = { cpus: "CPUs", mem: "memory", gpus: "GPUs" };

/** The parts of the address after `#/`. */
function useRoute() {
  const read = () => location.hash.replace(/^#\/?/, "").split("/").map(decodeURIComponent);
  const [route, setRoute] = useState(read);
  useEffect(() => {
    const changed = () => setRoute(read());
    addEventListener("hashchange", changed);
    return () => removeEventListener("hashchange", changed);
  }, []);
  return route;
}

function SignIn({ refused }) {
  const submit = (event) => {
    event.preventDefault();
    signIn(new FormData(event.target).get("token"));
  };
  return html`<main class="sign-in">
    <h1>Dike</h1>
    <form onSubmit=${submit}>
      <label for="token">Token</label>
      <input id="token" name="token" type="password" required autocomplete="off" autofocus />
      <button class="primary">Sign in</button>
    </form>
    ${refused && html`<p class="alert" role="alert">${refused}</p>`}
    <p class="quiet">The service's operator gives out tokens. It is kept until this tab is closed.</p>
  </main>`;
}

function Away({ since, me, cluster }) {
  if (me?.read_only)
    return html`<div class="banner" role="alert">
      The command that showed this page has not answered since <${Clock} at=${since} />. If it has ended,
      ${" "}<code>dike trials --page</code> shows its searches again. <button onClick=${tryNow}>Try now</button>
    </div>`;
  const jobs = cluster?.private
    ? "It runs a private Mesos: if the service has ended, that Mesos and all running jobs have ended with it."
    : "Running jobs continue without it; no job starts until it is back.";
  return html`<div class="banner" role="alert">
    The service has not answered since <${Clock} at=${since} />. This page shows the last known state. ${jobs}
    ${" "}<button onClick=${tryNow}>Try now</button>
  </div>`;
}

function Use({ cluster }) {
  const agents = (cluster?.agents ?? []).filter((agent) => agent.active);
  const sum = (field, name) => agents.reduce((total, agent) => total + (agent[field][name] ?? 0), 0);
  return html`<dl class="use" aria-label="What all agents have and what is in use">
    ${Object.entries(SHOWN).map(([name, label]) => {
      const total = sum("total", name);
      const used = sum("used", name);
      const text = total > 0 ? share(name, used, total) : "none";
      return html`<div>
        <dt>${label}</dt>
        <dd><${Bar} part=${total > 0 ? used / total : 0} label=${`${label} in use`} text=${text} /> ${text}</dd>
      </div>`;
    })}
  </dl>`;
}

function Header({ me, cluster, here, away }) {
  const views = me?.read_only ? [["", "Searches"]] : VIEWS;
  const state = away !== null ? "away" : cluster === undefined ? "wait" : cluster.connected ? "good" : "bad";
  const text = {
    away: "no answer from the service",
    wait: "connecting to the service",
    good: `connected to Mesos at ${cluster?.master}`,
    bad: "not connected to Mesos: no job can start",
  }[state];
  return html`<header>
    <div class="head">
      <a class="brand" href="#/"><img src="favicon.svg" alt="" width="22" height="22" /> Dike</a>
      <nav aria-label="Views">
        ${views.map(
          ([path, name]) => html`<a href=${`#/${path}`} aria-current=${here === path ? "page" : null}>${name}</a>`,
        )}
      </nav>
      ${!me?.read_only && html`<span class="link" role="status"><span class=${`dot ${state}`} aria-hidden="true"></span> ${text}</span>`}
      <span class="me">
        ${me?.user}${me?.admin && !me.read_only ? " (admin)" : ""} ${token() &&
        html`<button class="plain" onClick=${() => signOut()}>Sign out</button>`}
      </span>
    </div>
    ${!me?.read_only && html`<${Use} cluster=${cluster} />`}
  </header>`;
}

function SignedIn({ away }) {
  const [view, id] = useRoute();
  const me = useLive((_, signal) => get("me", {}, signal), [], false).data;
  // A page of stored searches has no cluster.
  const isService = me !== undefined && !me.read_only;
  const cluster = useLive((_, signal) => isService && get("cluster", {}, signal), [isService], isService).data || undefined;
  const main = useRef(null);
  const isFirst = useRef(true);
  const here = view === "jobs" ? "" : view;
  useEffect(() => {
    document.title = id ? `${id} – Dike` : `${VIEWS.find(([path]) => path === here)?.[1] ?? "Not found"} – Dike`;
    if (!isFirst.current) main.current.focus();
    isFirst.current = false;
  }, [view, id]);
  let content = html`<h1>Not found</h1><p>There is no such view. <a href="#/">See all jobs</a></p>`;
  if (view === "jobs" && id) content = html`<${JobView} key=${id} id=${id} me=${me} cluster=${cluster} />`;
  else if (here === "") content = html`<${JobsView} me=${me} />`;
  else if (here === "cluster") content = html`<${ClusterView} cluster=${cluster} />`;
  else if (here === "submit") content = html`<${SubmitView} />`;
  const skip = (event) => {
    event.preventDefault();
    main.current.focus();
  };
  return html`<a class="skip" href="#main" onClick=${skip}>Skip to the content</a>
    <${Header} me=${me} cluster=${cluster} here=${here} away=${away} />
    ${away !== null && html`<${Away} since=${away} me=${me} cluster=${cluster} />`}
    <main id="main" ref=${main} tabindex="-1" class=${away === null ? "" : "stale"}>${content}</main>`;
}

function App() {
  const connection = useConnection();
  return token() || connection.proxied
    ? html`<${SignedIn} key=${token() ?? "proxy"} away=${connection.awaySince} />`
    : html`<${SignIn} refused=${connection.refused} />`;
}

takeTokenFromAddress();
addEventListener("hashchange", takeTokenFromAddress);
findProxy().then(() => render(html`<${App} />`, document.getElementById("app")));
