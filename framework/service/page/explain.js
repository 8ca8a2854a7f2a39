/** Why a job does not run: the reason, its needs, and what each agent lacks. */

import { html } from "./vendor/htm-preact.js";
import { get, useLive } from "./api.js";
import { Ago, amount, counted } from "./format.js";
import { Pending } from "./parts.js";

const NAMES = { cpus: "CPU", mem: "memory", disk: "disk", gpus: "GPU", ports: "port" };

export function amounts(resources) {
  const found = Object.entries(NAMES).filter(([name]) => resources[name] > 0);
  return found
    .map(([name, one]) =>
      ["mem", "disk"].includes(name) ? `${amount(name, resources[name])} ${one}` : counted(resources[name], one),
    )
    .join(", ");
}

function Need({ need }) {
  return html`<li>${counted(need.count, need.name)} with ${amounts(need)}${need.count > 1 ? " each" : ""}</li>`;
}

function AgentRow({ row }) {
  const jobs = Object.entries(row.held_by_jobs);
  const others = amounts(row.held_by_others);
  const missing = amounts(row.missing);
  return html`<tr>
    <th scope="row">${row.node}</th>
    <td>${amounts(row.total)}</td>
    <td>
      ${row.free === null ? "never offered" : amounts(row.free) || "nothing"}
      ${row.offered_s !== null && html` <span class="quiet"><${Ago} at=${row.offered_s} /></span>`}
    </td>
    <td class=${missing ? "short" : ""}>${missing || "–"}</td>
    <td>
      ${!row.can_ever_hold && html`<p>too small even when empty</p>`}
      ${row.obstacles.map((obstacle) => html`<p>${obstacle}</p>`)}
      ${jobs.map(
        ([id, held]) => html`<p><a href=${`#/jobs/${encodeURIComponent(id)}`}>${id}</a> holds ${amounts(held)}</p>`,
      )}
      ${others && html`<p>other frameworks hold ${others}</p>`}
    </td>
  </tr>`;
}

export function Explain({ id, active }) {
  const { data, error } = useLive(
    (_, signal) => get(`jobs/${encodeURIComponent(id)}/explain`, {}, signal),
    [id],
    active,
  );
  if (data === undefined) return html`<${Pending} error=${error} />`;
  return html`<p class="sentence">${data.sentence}</p>
    ${
      data.needs.length > 0 &&
      html`<p>It takes at least:</p>
        <ul>${data.needs.map((need) => html`<${Need} need=${need} />`)}</ul>`
    }
    ${data.ahead.length > 0 && html`<p>Served before it: ${data.ahead.join(", ")}</p>`}
    ${
      data.could_be_freed.length > 0 &&
      html`<p>What could be freed:</p>
        <ul>${data.could_be_freed.map((text) => html`<li>${text}</li>`)}</ul>`
    }
    <p class="quiet">
      Last offer from Mesos: ${data.last_offer_s === null ? "none yet" : html`<${Ago} at=${data.last_offer_s} />`}
    </p>
    ${
      data.agents.length > 0 &&
      html`<div class="scroll"><table>
      <thead>
        <tr>
          <th scope="col">Agent</th><th scope="col">Has</th><th scope="col">Free when last offered</th>
          <th scope="col">Missing</th><th scope="col">In the way</th>
        </tr>
      </thead>
      <tbody>${data.agents.map((row) => html`<${AgentRow} key=${row.agent_id} row=${row} />`)}</tbody>
    </table></div>`
    }`;
}
