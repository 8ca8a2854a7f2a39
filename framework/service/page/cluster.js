/** The service, its master, the agents and their tasks. */

import { html } from "./vendor/htm-preact.js";
import { AgentBoxes } from "./agents.js";
import { Ago } from "./format.js";
import { FactList, Pending } from "./parts.js";

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
    ${cluster.agents?.length > 0 && html`<${AgentBoxes} agents=${cluster.agents} />`}`;
}
