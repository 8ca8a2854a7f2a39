/** A search: its best trial; its trials as curves, parallel coordinates and a table; its slots. */

import { html, useCallback, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { get, useLive } from "./api.js";
import { Curves } from "./curves.js";
import { colour, coloured, dash, duration, figure } from "./format.js";
import { Output } from "./output.js";
import { Importance, Parallel } from "./parallel.js";
import { Badge, Bar, Copyable, Pending } from "./parts.js";
import { Timeline } from "./timeline.js";

const CURVES_SHOWN = 40;
const POINTS_OF_ALL = 4000;
const ROWS = 50;
const TRIALS_ENDED = ["finished", "stopped", "failed"];

/** The trials in the ranking of all tables, best first. */
function inOrder({ trials, ranking }) {
  const byNumber = new Map(trials.map((trial) => [trial.number, trial]));
  return ranking.map((number) => byNumber.get(number));
}

function parametersOf(trial) {
  return Object.entries(trial.parameters)
    .map(([name, value]) => `${name}=${typeof value === "number" ? Number(value.toPrecision(4)) : value}`)
    .join(", ");
}

function Sample({ number }) {
  const style = { ...coloured(number), strokeDasharray: dash(number).join(" ") };
  return html`<svg class="sample" width="26" height="8" aria-hidden="true"><line x1="0" x2="26" y1="4" y2="4" style=${style} /></svg>`;
}

function TrialCurves({ losses, trials, pointed, setPointed }) {
  const shown = useMemo(() => {
    const known = trials.filter((trial) => losses[trial.number]?.some((point) => point.loss !== null));
    const running = known.filter((trial) => trial.state === "running");
    return [...new Set([...running, ...known])].slice(0, CURVES_SHOWN).sort((one, other) => one.number - other.number);
  }, [losses, trials]);
  const data = useMemo(() => {
    const tables = shown.map((trial) => [
      losses[trial.number].map((point) => point.step),
      losses[trial.number].map((point) => point.loss),
    ]);
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }, [shown]);
  const numbers = shown.map((trial) => trial.number).join();
  const onFocus = useCallback((index) => setPointed(index === null ? null : shown[index].number), [numbers]);
  if (!shown.length) return html`<p class="quiet">No trial has reported a loss yet.</p>`;
  const series = shown.map(({ number }) => ({
    label: `trial ${number}`,
    colour: colour(number),
    dash: dash(number),
    isShort: losses[number].length < 3,
  }));
  const focus = shown.findIndex((trial) => trial.number === pointed);
  const trial = shown[focus];
  const cut =
    shown.length < Object.keys(losses).length
      ? `, ${shown.length} of ${Object.keys(losses).length} trials: those that run and the best`
      : "";
  const last = trials.filter((one) => one.loss !== null).sort((one, other) => one.loss - other.loss)[0];
  const summary =
    `loss of ${shown.length} trials by step` +
    (last ? `; the least is ${figure(last.loss)} of trial ${last.number} at step ${last.step}` : "") +
    "; the table of trials has the others";
  return html`<${Curves} title=${`Training loss by step${cut}`} summary=${summary} data=${data} series=${series}
      focus=${focus < 0 ? null : focus} onFocus=${onFocus} />
    <ul class="legend" aria-label="trials of the curves">
      ${shown.map(
        ({ number }) => html`<li key=${number}>
        <button class=${number === pointed ? "pointed" : ""} onClick=${() => setPointed(number)}
          onMouseEnter=${() => setPointed(number)} onMouseLeave=${() => setPointed(null)}>
          <${Sample} number=${number} /> ${number}
        </button>
      </li>`,
      )}
    </ul>
    <p class="pointed-at quiet">
      ${trial ? `trial ${trial.number}: ${parametersOf(trial)}` : "Point at a curve or a number to see that trial's parameters."}
    </p>`;
}

function Best({ list, trials, active }) {
  const { best } = list;
  if (!best) return null;
  const trial = trials.find((one) => one.number === best.number);
  return html`<div class="best-so-far">
    <p>
      ${active ? "Best so far" : "Best"}: trial ${trial.number}, <strong>${best.in_words}</strong>
      ${" "}(${trial.state})${Object.keys(trial.parameters).length ? `: ${parametersOf(trial)}` : ""}
    </p>
    ${best.export_command && html`<${Copyable} label="Save its model" text=${best.export_command} />`}
    ${best.train_command && html`<${Copyable} label="Train with its parameters" text=${best.train_command} />`}
  </div>`;
}

function Trial({ trial, isBest, isLoss, hasBest, yours, onOutput }) {
  return html`<tr class=${isBest ? "best" : ""}>
    <th scope="row">
      <${Sample} number=${trial.number} /> ${trial.number}${isBest && html` <span class="tag">best</span>`}
    </th>
    <td><${Badge} state=${trial.state} text=${trial.status} /></td>
    <td class="number">${figure(trial.value)}</td>
    ${hasBest && html`<td class="number wide">${figure(trial.best_value)}</td>`}
    ${!isLoss && html`<td class="number wide">${figure(trial.loss)}</td>`}
    <td class="number step">${figure(trial.step)}</td>
    <td class="parameters">
      ${parametersOf(trial)}
      ${trial.error && html`<details><summary>why it failed</summary><pre tabindex="0">${trial.error}</pre></details>`}
    </td>
    <td class="number wide">${trial.runs}</td>
    <td class="number wide">${trial.slot_s === null ? "–" : duration(trial.slot_s)}</td>
    ${yours && html`<td class="act"><button class="plain" onClick=${onOutput} aria-label=${`Output of trial ${trial.number}`}>Output</button></td>`}
  </tr>`;
}

function Trials({ list, trials, yours, onOutput }) {
  const [rows, setRows] = useState(ROWS);
  const metric = list.metric;
  const isLoss = metric === "loss";
  const hasBest = list.value === "last";
  return html`<h2 id="trials">Trials by ${metric}, the ${list.mode === "max" ? "greatest" : "least"} first</h2>
    <div class="scroll"><table class="trials">
      <thead>
        <tr>
          <th scope="col">Trial</th><th scope="col">State</th>
          <th scope="col" class="number">${hasBest ? "Last" : "Best"} ${metric}</th>
          ${hasBest && html`<th scope="col" class="number wide">Best ${metric}</th>`}
          ${!isLoss && html`<th scope="col" class="number wide">Training loss</th>`}
          <th scope="col" class="number">Step</th>
          <th scope="col">Parameters</th>
          <th scope="col" class="number wide">Runs</th><th scope="col" class="number wide">Ran for</th>
          ${yours && html`<td></td>`}
        </tr>
      </thead>
      <tbody>
        ${trials
          .slice(0, rows)
          .map(
            (trial) => html`<${Trial} key=${trial.number} trial=${trial} isBest=${trial.number === list.best?.number} isLoss=${isLoss}
              hasBest=${hasBest} yours=${yours} onOutput=${() => onOutput(trial.number)} />`,
          )}
      </tbody>
    </table></div>
    ${rows < trials.length && html`<button onClick=${() => setRows(rows + ROWS)}>Show more trials</button>`}`;
}

async function load(id, signal) {
  const path = `jobs/${encodeURIComponent(id)}`;
  const [list, { slices }] = await Promise.all([get(`${path}/trials`, {}, signal), get(`${path}/slices`, {}, signal)]);
  const limit = Math.max(20, Math.min(200, Math.floor(POINTS_OF_ALL / Math.max(list.trials.length, 1))));
  const { losses } = await get(`${path}/losses`, { limit }, signal);
  return { list, slices, losses, trials: inOrder(list) };
}

function Progress({ found, active, pointed, setPointed }) {
  const { list, slices, losses, trials } = found;
  const ended = trials.filter((trial) => TRIALS_ENDED.includes(trial.state)).length;
  const text = `${ended} of ${list.trial_count} trials have ended`;
  const part = list.trial_count ? ended / list.trial_count : 0;
  return html`<p class="now"><${Bar} part=${part} label="trials that have ended" text=${text} /> ${text}</p>
    <${Best} list=${list} trials=${trials} active=${active} />
    <${TrialCurves} losses=${losses} trials=${trials} pointed=${pointed} setPointed=${setPointed} />
    <${Timeline} slices=${slices} active=${active} />`;
}

/**
 * The importance of the parameters; undefined before the first answer. For thousands of trials that takes seconds of the
 * service, so the trials come first.
 */
function useImportance(id, trials, active) {
  const finished = useRef(0);
  finished.current = trials?.filter((trial) => trial.state === "finished").length;
  const load = async (before, signal) => {
    const count = finished.current;
    if (count === undefined) return undefined;
    if (before !== undefined && before.count === count) return before;
    return { count, found: await get(`jobs/${encodeURIComponent(id)}/importance`, {}, signal) };
  };
  // After the end, the last trials may arrive after the last answer.
  const last = active ? null : finished.current;
  return useLive(load, [id, trials === undefined, last], active).data?.found;
}

function Parameters({ found, importance, space, pointed, setPointed }) {
  const { list, trials } = found;
  const drawn = trials.filter((trial) => trial.state !== "failed" && trial.value !== null);
  if (!drawn.some((trial) => Object.keys(trial.parameters).length)) return null;
  return html`<section aria-labelledby="parameters">
    <h2 id="parameters">Parameters</h2>
    <${Parallel} trials=${drawn} space=${space} metric=${list.metric} mode=${list.mode}
      pointed=${pointed} onPoint=${setPointed} />
    ${importance && html`<${Importance} found=${importance} />`}
  </section>`;
}

function TrialOutput({ id, number, active, close }) {
  return html`<section aria-labelledby="trial-output" ref=${(box) => box?.scrollIntoView({ block: "nearest" })}>
    <div class="title">
      <h2 id="trial-output">Output of trial ${number}</h2> <button class="actions" onClick=${close}>Close</button>
    </div>
    <${Output} key=${number} id=${id} trial=${number} active=${active} />
  </section>`;
}

export function Search({ job, active, where }) {
  const { id } = job;
  const { data, error } = useLive((_, signal) => load(id, signal), [id], active);
  const importance = useImportance(id, data?.trials, active);
  const [pointed, setPointed] = useState(null);
  const [output, setOutput] = useState(null);
  const close = useCallback(() => setOutput(null), []);
  const spec = job.request?.spec;
  const trial = data?.trials.find((one) => one.number === output);
  return html`<section aria-labelledby="progress">
      <h2 id="progress">Progress</h2>
      ${
        data === undefined
          ? html`<${Pending} error=${error} />`
          : html`<${Progress} found=${data} active=${active} pointed=${pointed} setPointed=${setPointed} />`
      }
    </section>
    ${data && html`<${Parameters} found=${data} importance=${importance} space=${spec?.space ?? []} pointed=${pointed} setPointed=${setPointed} />`}
    ${
      data?.trials.length > 0 &&
      html`<section aria-labelledby="trials">
        <${Trials} list=${data.list} trials=${data.trials} yours=${job.yours} onOutput=${setOutput} />
      </section>`
    }
    ${
      trial &&
      html`<${TrialOutput} id=${id} number=${output} close=${close}
        active=${active && !TRIALS_ENDED.includes(trial.state)} />`
    }
    ${where}`;
}
