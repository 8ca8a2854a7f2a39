/** One job: why it waits, progress, agents, events, output and files. */

import { html, useMemo, useState } from "./vendor/htm-preact.js";
import { get, now, post, useLive } from "./api.js";
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
const FOLDED_FROM = 3;
/** The smoothed speed is a mean over about 1/15 of the curve. */
const SMOOTHING_DIVISOR = 15;

function Facts({ job }) {
  const end = job.ended_s ?? now();
  const facts = [
    ["Kind", job.kind],
    ["User", job.user],
    ["Script", html`<code>${job.script}</code>`],
    ["Submitted", html`<${Ago} at=${job.submitted_s} />`],
  ];
  if (job.waiting_s !== null) {
    const place = job.queue_position === null ? "" : `number ${job.queue_position}, `;
    facts.push(["In the queue", `${place}waiting for ${duration(job.waiting_s)}`]);
  }
  if (job.started_s !== null) facts.push([job.ended_s === null ? "Running for" : "Ran for", duration(end - job.started_s)]);
  if (!ENDED.includes(job.state)) facts.push(["Live tasks", job.live_tasks]);
  if (job.priority !== "normal") facts.push(["Priority", job.priority]);
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
      () => setSaid("Ending …"),
      (error) => setSaid(error.message),
    );
  const isHeld = job.request?.hold && job.started_s === null && !hasEnded;
  const release = () =>
    post(`${path}/release`).then(
      () => setSaid("Released …"),
      (error) => setSaid(error.message),
    );
  const again = () =>
    post(`${path}/again`).then(
      (made) => (location.hash = `#/jobs/${encodeURIComponent(made.id)}`),
      (error) => setSaid(error.message),
    );
  // Reloads, as a job that has ended is no longer polled.
  const resume = () =>
    post(`${path}/resume`).then(
      () => location.reload(),
      (error) => setSaid(error.message),
    );
  return html`<div class="actions">
    ${!hasEnded && html`<button class="danger" disabled=${job.kill_requested} onClick=${ask}>Kill</button>`}
    ${isHeld && html`<button onClick=${release}>Release</button>`}
    ${isResumable && html`<button onClick=${resume}>Resume</button>`}
    ${hasEnded && html`<button onClick=${again}>Submit again</button>`}
    <span role="status">${hasEnded ? "" : said || (job.kill_requested ? "Ending …" : "")}</span>
    ${hasEnded && said && html`<span role="alert">${said}</span>`}
    ${asks && html`<${Confirm} question=${question} yes="Kill it" onYes=${kill} onNo=${() => setAsks(false)} />`}
  </div>`;
}

function column(points, name) {
  return points.map((point) => point[name]);
}

/** Exponential moving average; missing values stay missing. */
function smoothed(values) {
  const weight = 2 / (Math.max(5, values.length / SMOOTHING_DIVISOR) + 1);
  let mean = null;
  return values.map((value) => {
    if (value === null) return null;
    mean = mean === null ? value : mean + weight * (value - mean);
    return mean;
  });
}

function Progress({ points, predicted }) {
  const data = useMemo(() => {
    const steps = column(points, "step");
    const speed = column(points, "samples_per_s");
    const rows = [steps, speed, smoothed(speed)];
    return { loss: [steps, column(points, "loss")], speed: predicted ? [...rows, steps.map(() => predicted)] : rows };
  }, [points, predicted]);
  if (!points.length) return html`<p class="quiet">No step has been reported yet.</p>`;
  const first = points[0];
  const last = points.at(-1);
  const isShort = points.length < FEW_POINTS;
  const hasSpeed = points.some((point) => point.samples_per_s !== null);
  const loss = (point) => `${figure(point.loss)} at step ${point.step}`;
  const mean = data.speed[2].findLast((value) => value !== null);
  const beside = predicted ? `; the plan predicts ${figure(predicted)}` : "";
  const said = {
    loss: `loss by step: ${loss(first)}, ${loss(last)}`,
    speed: `samples a second by step: ${figure(mean)} now, smoothed${beside}`,
  };
  const series = {
    loss: [{ label: "loss", colour: "--series-0", isShort }],
    speed: [
      { label: "measured", colour: "--faint", width: 1, isShort },
      { label: "smoothed", colour: "--series-0", width: 2.5 },
      ...(predicted ? [{ label: "predicted by the plan", colour: "--series-4", width: 2, dash: [9, 4] }] : []),
    ],
  };
  return html`<p class="now">Step <strong>${figure(last.step)}</strong>, loss <strong>${figure(last.loss)}</strong>,
      ${hasSpeed && html` <strong>${figure(mean)}</strong> samples/s${predicted && ` (predicted ${figure(predicted)})`},`} reported
      ${" "}<${Ago} at=${last.time_s} /></p>
    <div class="pair">
      <${Curves} title="Training loss" summary=${said.loss} data=${data.loss} series=${series.loss} />
      ${
        hasSpeed &&
        html`<${Curves} title="Samples/s" summary=${said.speed} data=${data.speed} series=${series.speed} isLinear />`
      }
    </div>`;
}

function Training({ job, active, where }) {
  const path = `jobs/${encodeURIComponent(job.id)}`;
  const { data, error } = useLive(
    (_, signal) => get(`${path}/progress`, { limit: POINTS }, signal),
    [job.id],
    active,
  );
  const plan = useLive((_, signal) => get(`${path}/plan`, {}, signal), [job.id], active).data?.plan;
  return html`<section aria-labelledby="progress">
      <h2 id="progress">Progress</h2>
      ${data === undefined ? html`<${Pending} error=${error} />` : html`<${Progress} points=${data.points} predicted=${plan?.samples_per_s} />`}
    </section>
    ${where}
    <${Plan} plan=${plan} />`;
}

/** All events after a number, page by page. */
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

/** Events, newest first, with consecutive ones of the same kind grouped. */
function folded(events) {
  const groups = [];
  for (const event of events.toReversed()) {
    if (groups.at(-1)?.[0].kind === event.kind) groups.at(-1).push(event);
    else groups.push([event]);
  }
  return groups.flatMap((group) => (group.length < FOLDED_FROM ? group.map((event) => [event]) : [group]));
}

function EventLine({ event }) {
  return html`<${Clock} at=${event.time_s} /> <span class="kind">${event.kind}</span>
    ${" "}<span class="said">${event.text}</span>`;
}

function EventGroup({ group: [newest, ...others] }) {
  if (!others.length) return html`<li><${EventLine} event=${newest} /></li>`;
  return html`<li><${EventLine} event=${newest} />
    <details>
      <summary>${others.length} earlier events of the kind “${newest.kind}”</summary>
      <ol class="plain">${others.map((event) => html`<li key=${event.number}><${EventLine} event=${event} /></li>`)}</ol>
    </details>
  </li>`;
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
  // Keyed by a group's oldest event, so that an open group stays open while it grows.
  const groups = folded(data.events);
  return html`<div class="events" tabindex="0" role="group" aria-label="events, newest first">
    <ol class="plain">${groups.map((group) => html`<${EventGroup} key=${group.at(-1).number} group=${group} />`)}</ol>
  </div>`;
}

export function JobView({ id, me, cluster }) {
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
  return html`<p class="back"><a href="#/">All ${me?.read_only ? "searches" : "jobs"}</a></p>
    <div class="title"><h1>${job.id}</h1> <${Badge} state=${job.state} /> ${me && !me.read_only && html`<${Actions} job=${job} />`}</div>
    <${Facts} job=${job} />
    ${job.failure && html`<p class=${job.state === "failed" ? "alert failure" : "quiet"}>${job.failure}</p>`}
    ${job.state === "queued" ? why : active && job.waiting && html`<p class="quiet">${job.waiting}</p>`}
    <${job.kind === "search" ? Search : Training} job=${job} active=${active} where=${where} />
    ${me && !me.read_only && html`<section aria-labelledby="events"><h2 id="events">Events</h2><${Events} id=${id} active=${active} /></section>`}
    ${
      job.yours &&
      me &&
      !me.read_only &&
      html`<section aria-labelledby="output">
        <h2 id="output">Output</h2>
        ${job.kind === "search" && html`<p class="quiet">What a trial prints is behind “Output” in the table of trials.</p>`}
        <${Output} id=${id} active=${active} />
      </section>`
    }
    ${
      job.yours &&
      html`<section aria-labelledby="files">
        <h2 id="files">Files written</h2>
        <${Files} id=${id} active=${active} />
      </section>`
    }`;
}
