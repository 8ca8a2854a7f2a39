/** Agents as boxes with a bar for each resource, filled by tasks. */

import { html } from "./vendor/htm-preact.js";
import { amounts } from "./explain.js";
import { amount, coloured, share } from "./format.js";

const STRIPS = { cpus: "CPUs", mem: "memory", gpus: "GPUs" };
const ROLES = ["worker", "ps", "chief"];
const ROUNDING = 1e-6;

/** Job id -> its colour number, by the order of the ids on these agents. */
function jobColours(agents) {
  const ids = [...new Set(agents.flatMap((agent) => agent.tasks.map((task) => task.job_id)))].sort();
  return new Map(ids.map((id, place) => [id, place]));
}

/** A task's colour number: that of its job, or of its role if `jobId` is shown; null for other jobs. */
function taskNumber(task, jobId, jobs) {
  if (!jobId) return jobs.get(task.job_id);
  return task.job_id === jobId ? Math.max(ROLES.indexOf(task.name.split(":")[0]), 0) : null;
}

function Strip({ agent, name, numbers }) {
  const total = agent.total[name] ?? 0;
  const pieces = agent.tasks
    .filter((task) => task.resources[name] > 0)
    .map((task) => ({
      held: task.resources[name],
      text: task.name,
      of: `${task.job_id}, ${task.name}`,
      number: numbers.get(task.task_id),
    }));
  const others = (agent.used[name] ?? 0) - (agent.held[name] ?? 0);
  if (others > ROUNDING) pieces.push({ held: others, text: "others", of: "other frameworks", others: true });
  const used = pieces.reduce((sum, piece) => sum + piece.held, 0);
  return html`<div class="strip">
    <span class="strip-name">${STRIPS[name]}</span>
    <span class="strip-box" role="img" aria-label=${`${STRIPS[name]}: ${share(name, used, total)} in use`}>
      ${pieces.map(
        (piece) => html`<span
          class=${piece.others ? "piece others" : piece.number === null ? "piece other-job" : "piece"}
          style=${{ width: `${(100 * piece.held) / Math.max(total, used)}%`, ...coloured(piece.number ?? 0) }}
          title=${`${piece.of}: ${amount(name, piece.held)}`}><span>${piece.text}</span></span>`,
      )}
    </span>
    <span class="strip-sum">${share(name, used, total)}</span>
  </div>`;
}

function Swatch({ number }) {
  const kind = number === null ? "swatch other-job" : "swatch";
  return html`<span class=${kind} style=${coloured(number ?? 0)} aria-hidden="true"></span>`;
}

function Box({ agent, jobId, jobs }) {
  const numbers = new Map(agent.tasks.map((task) => [task.task_id, taskNumber(task, jobId, jobs)]));
  const shown = jobId ? agent.tasks.filter((task) => task.job_id === jobId) : agent.tasks;
  return html`<section class="agent" aria-label=${`agent ${agent.node}`}>
    <h3>${agent.node} ${!agent.active && html`<span class="badge state-failed">away</span>`}</h3>
    ${Object.entries(agent.attributes).map(([name, value]) => html`<span class="attribute">${name}: ${value}</span>`)}
    ${Object.keys(STRIPS)
      .filter((name) => agent.total[name] > 0)
      .map((name) => html`<${Strip} agent=${agent} name=${name} numbers=${numbers} />`)}
    <ul class="tasks">
      ${shown.map(
        (
          task,
        ) => html`<li key=${task.task_id} title=${`${amounts(task.resources)}${task.message && `; ${task.message}`}`}>
          <${Swatch} number=${numbers.get(task.task_id)} />
          ${task.name} <span class="quiet">${task.state}</span>
          ${!jobId && html` <a href=${`#/jobs/${encodeURIComponent(task.job_id)}`}>${task.job_id}</a>`}
        </li>`,
      )}
    </ul>
  </section>`;
}

/** With a `jobId`, colours its tasks by role and shows those of other jobs in grey. */
export function AgentBoxes({ agents, jobId }) {
  const jobs = jobColours(agents);
  return html`<div class="agents">
    ${agents.map((agent) => html`<${Box} key=${agent.id} agent=${agent} jobId=${jobId} jobs=${jobs} />`)}
  </div>`;
}
