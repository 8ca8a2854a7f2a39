/** One job: why it waits, how it trains, where it runs, what happens and what it writes. */

import { html, useMemo, useState } from "./vendor/htm-preact.js";
import { get, post, useLive } from "./api.js";
import { AgentBoxes } from "./agents.js";
import { Curves } from "./curves.js";
import { Explain } from "./explain.js";
import { Files } from "./files.js";
import { Ago, Clock, duration, figure } from "./format.js";
import { Output } from "./output.js";
import { Badge, Confirm, ENDED, FactList, Pending } from "./parts.js";
import { Search } from "./search.js";
import { Plan } from "./plan.js";

const POINTS = 600;
const FEW_POINTS = 20;
const EVENTS_SHOWN = 200;
const EVENTS_PAGE = 1000;

function Facts({ job }) {
  const end = job.ended_s ?? Date.now() / 1000;
  const facts = [
    ["Kind", job.kind],
    ["User", job.user],
    ["Script", html`<code>${job.script}</code>`],
    ["Submitted", html`<${Ago} at=${job.submitted_s} />`],
    ["Ran for", job.started_s === null ? "–" : duration(end - job.started_s)],
    ["Live tasks", job.live_tasks],
  ];
  if (job.constraints.length) facts.push(["Constraints", job.constraints.join(", ")]);
  return html`<${FactList} facts=${facts} />`;
}

function Actions({ job }) {
  const [asks, setAsks] = useState(false);
  const [said, setSaid] = useState("");
  const hasEnded = ENDED.includes(job.state);
  const isResumable = hasEnded && job.kind === "search" && job.state !== "finished";
  if (!job.yours) return null;
  const path = `jobs/${encodeURIComponent(job.id)}`;
  const question = `Kill ${job.id}? All its tasks end.`;
  const ask = () => setAsks(true);
  const kill = () =>
    post(`${path}/kill`).then(
      () => setSaid("Its end has been asked for."),
      (error) => setSaid(error.message),
    );
  const again = () =>
    post(`${path}/again`).then(
      (made) => (location.hash = `#/jobs/${encodeURIComponent(made.id)}`),
      (error) => setSaid(error.message),
    );
  // What has ended is not looked at any more.
  const resume = () =>
    post(`${path}/resume`).then(
      () => location.reload(),
      (error) => setSaid(error.message),
    );
  return html`<div class="actions">
    ${!hasEnded && html`<button class="danger" disabled=${job.kill_requested} onClick=${ask}>Kill</button>`}
    ${isResumable && html`<button onClick=${resume}>Go on</button>`}
    ${hasEnded && html`<button onClick=${again}>Submit again</button>`}
    <span role="status">${hasEnded ? "" : said || (job.kill_requested ? "Its end has been asked for." : "")}</span>
    ${hasEnded && said && html`<span role="alert">${said}</span>`}
    ${asks && html`<${Confirm} question=${question} yes="Kill it" onYes=${kill} onNo=${() => setAsks(false)} />`}
  </div>`;
}

function column(points, name) {
  return points.map((point) => point[name]);
}

function Progress({ points }) {
  const data = useMemo(
    () => ["loss", "samples_per_s"].map((name) => [column(points, "step"), column(points, name)]),
    [points],
  );
  if (!points.length) return html`<p class="quiet">No step has been reported yet.</p>`;
  const first = points[0];
  const last = points.at(-1);
  const isShort = points.length < FEW_POINTS;
  const hasSpeed = points.some((point) => point.samples_per_s !== null);
  const loss = (point) => `${figure(point.loss)} at step ${point.step}`;
  const said = {
    loss: `loss by step: ${loss(first)}, ${loss(last)}`,
    speed: `samples a second by step: ${figure(last.samples_per_s)} now`,
  };
  const series = {
    loss: [{ label: "loss", stroke: "hsl(212 70% 52%)", isShort }],
    speed: [{ label: "samples/s", stroke: "hsl(140 50% 42%)", isShort }],
  };
  return html`<p class="now">Step <strong>${figure(last.step)}</strong>, loss <strong>${figure(last.loss)}</strong>,
      ${hasSpeed && html` <strong>${figure(last.samples_per_s)}</strong> samples/s,`} reported
      ${" "}<${Ago} at=${last.time_s} /></p>
    <div class="pair">
      <${Curves} title="Training loss" summary=${said.loss} data=${data[0]} series=${series.loss} />
      ${
        hasSpeed &&
        html`<${Curves} title="Samples/s" summary=${said.speed} data=${data[1]} series=${series.speed} isLinear />`
      }
    </div>`;
}

function Training({ id, active, where }) {
  const { data, error } = useLive(
    (_, signal) => get(`jobs/${encodeURIComponent(id)}/progress`, { limit: POINTS }, signal),
    [id],
    active,
  );
  return html`<section aria-labelledby="progress">
      <h2 id="progress">Progress</h2>
      ${data === undefined ? html`<${Pending} error=${error} />` : html`<${Progress} points=${data.points} />`}
    </section>
    ${where}
    <${Plan} id=${id} active=${active} />`;
}

/** All events after a number: they come a page at a time. */
async function eventsAfter(id, number, signal) {
  const found = [];
  for (let after = number; ;) {
    const query = { after, limit: EVENTS_PAGE };
    const { events, after: next } = await get(`jobs/${encodeURIComponent(id)}/events`, query, signal);
    found.push(...events);
    after = next;
    if (events.length < EVENTS_PAGE) return { events: found, after };
  }
}

function Events({ id, active }) {
  const { data, error } = useLive(
    async (before, signal) => {
      const { events, after } = await eventsAfter(id, before?.after ?? 0, signal);
      if (before !== undefined && !events.length) return before;
      return { events: [...(before?.events ?? []), ...events].slice(-EVENTS_SHOWN), after };
    },
    [id],
    active,
  );
  if (data === undefined) return html`<${Pending} error=${error} />`;
  if (!data.events.length) return html`<p class="quiet">Nothing yet.</p>`;
  return html`<ol class="events" tabindex="0" aria-label="events, newest first">
    ${data.events.toReversed().map(
      (event) => html`<li key=${event.number}>
      <${Clock} at=${event.time_s} /> <span class="kind">${event.kind}</span> <span class="said">${event.text}</span>
    </li>`,
    )}
  </ol>`;
}

export function JobView({ id, cluster }) {
  const path = `jobs/${encodeURIComponent(id)}`;
  const [isOver, setIsOver] = useState(false);
  const { data: job, error } = useLive(
    async (_, signal) => {
      const found = await get(path, {}, signal);
      setIsOver(ENDED.includes(found.state));
      return found;
    },
    [id],
    !isOver,
  );
  if (job === undefined) return html`<h1>${id}</h1><${Pending} error=${error} />`;
  const active = !ENDED.includes(job.state);
  const agents = (cluster?.agents ?? []).filter((agent) => agent.tasks.some((task) => task.job_id === id));
  const where =
    agents.length > 0 &&
    html`<section aria-labelledby="where">
      <h2 id="where">Where it runs</h2>
      <${AgentBoxes} agents=${agents} jobId=${id} />
    </section>`;
  const why = html`<section class="why-waiting" aria-labelledby="why">
    <h2 id="why">Why it waits</h2>
    <${Explain} id=${id} active=${active} />
  </section>`;
  return html`<p class="back"><a href="#/">All jobs</a></p>
    <div class="title"><h1>${job.id}</h1> <${Badge} state=${job.state} /> <${Actions} job=${job} /></div>
    <${Facts} job=${job} />
    ${job.failure && html`<p class="alert failure">${job.failure}</p>`}
    ${job.state === "queued" ? why : active && job.waiting && html`<p class="quiet">${job.waiting}</p>`}
    <${job.kind === "search" ? Search : Training} id=${id} active=${active} where=${where} />
    <section aria-labelledby="events"><h2 id="events">Events</h2><${Events} id=${id} active=${active} /></section>
    ${
      job.yours &&
      html`<section aria-labelledby="output">
        <h2 id="output">Output</h2>
        <${Output} id=${id} active=${active} />
      </section>
      <section aria-labelledby="files">
        <h2 id="files">Files written</h2>
        <${Files} id=${id} active=${active} />
      </section>`
    }`;
}
