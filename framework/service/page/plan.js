/** The plan that a training job follows. */

import { html } from "./vendor/htm-preact.js";
import { amount, counted, figure } from "./format.js";

export function Plan({ plan }) {
  if (!plan) return null;
  return html`<section aria-labelledby="plan">
    <h2 id="plan">Plan</h2>
    <p>
      ${counted(plan.option.workers, "worker")}${
        plan.option.ps ? ` and ${counted(plan.option.ps, "parameter server")}` : ""
      };
      ${" "}predicted ${figure(plan.samples_per_s)} samples/s.
    </p>
    <details>
      <summary>Tasks and reasons</summary>
      <ul>${plan.why.map((reason) => html`<li>${reason}</li>`)}</ul>
      <div class="scroll"><table>
        <thead>
          <tr>
            <th scope="col">Task</th><th scope="col">Agent</th><th scope="col" class="number">CPUs</th>
            <th scope="col" class="number">Memory</th><th scope="col" class="number">GPUs</th>
          </tr>
        </thead>
        <tbody>${plan.tasks.map(
          (task) => html`<tr>
          <th scope="row">${task.role}:${task.index}</th><td>${task.node}</td>
          <td class="number">${figure(task.cpus)}</td>
          <td class="number">${amount("mem", task.mem_mb)}</td>
          <td class="number">${task.gpus}</td>
        </tr>`,
        )}</tbody>
      </table></div>
    </details>
  </section>`;
}
