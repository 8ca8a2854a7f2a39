/** The service, its master, the agents and their tasks. */

import { html } from "./vendor/htm-preact.js";
import { AgentBoxes } from "./agents.js";
import { get, useLive } from "./api.js";
import { Ago, figure } from "./format.js";
import { FactList, Pending } from "./parts.js";

/** Hours of GPUs and CPUs by user and week; only administrators get those of others. */
function Usage() {
  const rows = useLive((_, signal) => get("usage", { weeks: 4 }, signal), []).data?.usage ?? [];
  if (rows.length === 0) return null;
  return html`<h2>Usage in the last four weeks</h2>
    <div class="scroll" tabindex="0" role="region" aria-label="Usage"><table>
      <thead><tr>
        <th>Week of</th><th>User</th><th>Jobs</th><th>GPU hours</th><th>CPU hours</th><th>Hours of waiting</th>
      </tr></thead>
      <tbody>${rows.map(
        (row) => html`<tr key=${row.week + row.user}>
          <td>${row.week}</td><td>${row.user}</td><td>${row.jobs}</td>
          <td>${figure(row.gpu_hours)}</td><td>${figure(row.cpu_hours)}</td><td>${figure(row.waited_hours)}</td>
        </tr>`,
      )}</tbody>
    </table></div>`;
}

export function ClusterView({ cluster }) {
  if (cluster === undefined) return html`<h1>Cluster</h1><${Pending} />`;
  const facts = [
    ["Master", `${cluster.master} (Mesos ${cluster.mesos_version})`],
    ["Framework", cluster.framework_id ?? "not subscribed yet"],
    ["Dike", cluster.version],
    ["Service started", html`<${Ago} at=${cluster.started_s} />`],
  ];
  return html`<h1>Cluster</h1>
    <${FactList} facts=${facts} />
    <h2>Agents</h2>
    ${cluster.agents === null && html`<p class="quiet">The master does not list its agents.</p>`}
    ${cluster.agents?.length === 0 && html`<p class="quiet">No agent is registered with the master.</p>`}
    ${cluster.agents?.length > 0 && html`<${AgentBoxes} agents=${cluster.agents} />`}
    <${Usage} />`;
}
