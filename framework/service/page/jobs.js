/** All jobs as a table with filters: running ones, then the queue, then those that have ended. */

import { html, useState } from "./vendor/htm-preact.js";
import { get, useLive } from "./api.js";
import { Ago, duration, figure } from "./format.js";
import { Badge, Bar, ENDED, Pending } from "./parts.js";

const STATES = ["running", "ending", "queued", ...ENDED];
const PAGE = 50;

/** Kept while the page is open, so that the table is the same after a visit to a job. */
const filters = { user: "", state: "", text: "" };

function jobsQuery({ user, state, limit }) {
  const query = new URLSearchParams({ limit, order: "queue" });
  if (user) query.set("user", user);
  for (const name of state === "open" ? STATES.filter((known) => !ENDED.includes(known)) : state ? [state] : [])
    query.append("state", name);
  return query;
}

function Progress({ job }) {
  if (job.state === "queued" && job.waiting_s !== null) {
    const place = job.queue_position === null ? "" : `number ${job.queue_position} in the queue, `;
    return `${place}waiting for ${duration(job.waiting_s)}`;
  }
  if (job.trials) {
    const ended = (job.trials.finished ?? 0) + (job.trials.stopped ?? 0) + (job.trials.failed ?? 0);
    const all = Object.values(job.trials).reduce((total, count) => total + count, 0);
    const text = `${ended} of ${all} trials`;
    return html`<${Bar} part=${all ? ended / all : 0} label="trials that have ended" text=${text} /> ${text}`;
  }
  if (!job.progress) return "–";
  const speed = job.progress.samples_per_s;
  return `step ${figure(job.progress.step)}${speed === null ? "" : `, ${figure(speed)} samples/s`}`;
}

function Row({ job }) {
  const why = job.failure || job.waiting;
  return html`<tr>
    <td><${Badge} state=${job.state} /></td>
    <td class="job">
      <a href=${`#/jobs/${encodeURIComponent(job.id)}`}>${job.id}</a>
      ${why && html`<p class=${job.state === "failed" ? "why failed" : "why"} title=${why}>${why}</p>`}
    </td>
    <td class="wide">${job.user}</td>
    <td class="wide">${job.kind}</td>
    <td class="wide"><${Ago} at=${job.submitted_s} /></td>
    <td class="progress"><${Progress} job=${job} /></td>
    <td class="number">${figure(job.best ?? job.progress?.loss)}</td>
  </tr>`;
}

/** The number of jobs in each state, as buttons that filter by it. */
function Counts({ counts, values, change }) {
  const chip = (state) => {
    const isOn = values.state === state;
    const click = () => change({ ...values, state: isOn ? "" : state });
    return html`<li key=${state}>
      <button class=${`badge state-${state}`} aria-pressed=${isOn} onClick=${click}>${counts[state]} ${state}</button>
    </li>`;
  };
  return html`<ul class="counts" aria-label="jobs by state">${STATES.filter((state) => counts[state]).map(chip)}</ul>`;
}

function Filters({ me, users, values, change }) {
  const set = (name) => (event) => change({ ...values, [name]: event.target.value });
  return html`<form class="filters" role="search" onSubmit=${(event) => event.preventDefault()}>
    <label>User
      <select value=${values.user} onChange=${set("user")}>
        <option value="">everybody</option>
        ${users.map((user) => html`<option value=${user}>${user}${user === me?.user ? " (you)" : ""}</option>`)}
      </select>
    </label>
    <label>State
      <select value=${values.state} onChange=${set("state")}>
        <option value="">all</option>
        <option value="open">not ended</option>
        ${STATES.map((state) => html`<option value=${state}>${state}</option>`)}
      </select>
    </label>
    <label>Text
      <input type="search" value=${values.text} onInput=${set("text")} placeholder="job, script or reason" />
    </label>
  </form>`;
}

export function JobsView({ me }) {
  const [values, setValues] = useState({ ...filters });
  const [limit, setLimit] = useState(PAGE);
  const [users, setUsers] = useState([]);
  const { data, error } = useLive(
    async (_, signal) => {
      const list = await get("jobs", jobsQuery({ ...values, limit }), signal);
      setUsers((known) => [...new Set([...known, ...list.jobs.map((job) => job.user)])].sort());
      return list;
    },
    [values.user, values.state, limit],
  );
  const change = (next) => setValues(Object.assign(filters, next) && { ...next });
  const known = [...new Set([...users, me?.user, values.user])].filter(Boolean).sort();
  const wanted = values.text.toLowerCase();
  const jobs = (data?.jobs ?? []).filter((job) =>
    [job.id, job.script, job.waiting, job.failure].some((text) => text.toLowerCase().includes(wanted)),
  );
  const isFiltered = values.user || values.state || values.text;
  const none = isFiltered
    ? html`<p class="quiet">No job matches these filters.</p>`
    : me?.read_only
      ? html`<p class="quiet">There are no searches yet.</p>`
      : html`<p class="quiet">There are no jobs yet. <a href="#/submit">How to submit one</a></p>`;
  return html`<h1>${me?.read_only ? "Searches" : "Jobs"}</h1>
    ${data !== undefined && html`<${Counts} counts=${data.counts} values=${values} change=${change} />`}
    <${Filters} me=${me} users=${known} values=${values} change=${change} />
    ${data === undefined && html`<${Pending} error=${error} />`}
    ${data !== undefined && !jobs.length && none}
    ${
      jobs.length > 0 &&
      html`<div class="scroll"><table class="jobs">
      <thead>
        <tr>
          <th scope="col">State</th><th scope="col">Job</th>
          <th scope="col" class="wide">User</th><th scope="col" class="wide">Kind</th>
          <th scope="col" class="wide">Submitted</th><th scope="col">Progress</th>
          <th scope="col" class="number">Loss, or best value</th>
        </tr>
      </thead>
      <tbody>${jobs.map((job) => html`<${Row} key=${job.id} job=${job} />`)}</tbody>
    </table></div>`
    }
    ${data?.before && html`<button onClick=${() => setLimit(limit + PAGE)}>Show more jobs</button>`}`;
}
