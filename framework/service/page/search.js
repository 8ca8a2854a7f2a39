/** A search: its trials as a table and as curves, and who held which slot when. */

import { html, useCallback, useMemo, useState } from "./vendor/htm-preact.js";
import { get, useLive } from "./api.js";
import { Curves } from "./curves.js";
import { duration, figure, hue } from "./format.js";
import { Badge, Bar, Pending } from "./parts.js";
import { Timeline } from "./timeline.js";

const CURVES_SHOWN = 40;
const POINTS_OF_ALL = 4000;
const ROWS = 50;

/** Trials with the best first; those without a value last. */
function byValue(trials, mode) {
  const sign = mode === "max" ? -1 : 1;
  const rank = (trial) => (trial.state === "failed" || trial.value === null ? Infinity : sign * trial.value);
  return [...trials].sort((one, other) => rank(one) - rank(other) || one.number - other.number);
}

function parametersOf(trial) {
  return Object.entries(trial.parameters)
    .map(([name, value]) => `${name}=${typeof value === "number" ? Number(value.toPrecision(4)) : value}`)
    .join(", ");
}

export function trialColour(number) {
  return `hsl(${hue(number)} 60% 52%)`;
}

function TrialCurves({ losses, trials }) {
  const [pointed, setPointed] = useState(null);
  const ranked = useMemo(() => {
    const shown = trials.filter((trial) => losses[trial.number]?.some((point) => point.loss !== null));
    const running = shown.filter((trial) => trial.state === "running");
    return [...new Set([...running, ...shown])].slice(0, CURVES_SHOWN).sort((one, other) => one.number - other.number);
  }, [losses, trials]);
  const data = useMemo(() => {
    const tables = ranked.map((trial) => [
      losses[trial.number].map((point) => point.step),
      losses[trial.number].map((point) => point.loss),
    ]);
    return tables.length > 1 ? uPlot.join(tables) : tables[0];
  }, [ranked]);
  const onFocus = useCallback((index) => setPointed(index), []);
  if (!ranked.length) return html`<p class="quiet">No trial has reported a loss yet.</p>`;
  const trial = pointed === null ? undefined : ranked[pointed];
  const series = ranked.map(({ number }) => ({
    label: `trial ${number}`,
    stroke: trialColour(number),
    isShort: losses[number].length < 3,
  }));
  const cut =
    ranked.length < Object.keys(losses).length
      ? `, ${ranked.length} of ${Object.keys(losses).length} trials: those that run and the best`
      : "";
  const summary = `loss of ${ranked.length} trials by step; the table below has the last values`;
  return html`<${Curves} title=${`Training loss by step${cut}`} summary=${summary}
      data=${data} series=${series} onFocus=${onFocus} />
    <p class="pointed quiet">
      ${trial ? `trial ${trial.number}: ${parametersOf(trial)}` : "Point at a curve to see whose it is."}
    </p>`;
}

function Trial({ trial, isBest }) {
  return html`<tr class=${isBest ? "best" : ""}>
    <th scope="row">
      <span class="swatch" style=${{ "--hue": hue(trial.number) }} aria-hidden="true"></span> ${trial.number}
    </th>
    <td><${Badge} state=${trial.state} /></td>
    <td class="number">${figure(trial.value)}</td>
    <td class="number wide">${figure(trial.best_value)}${trial.best_step !== null && ` at step ${figure(trial.best_step)}`}</td>
    <td class="number wide">${figure(trial.loss)}</td>
    <td class="number">${figure(trial.step)}</td>
    <td class="parameters">
      ${parametersOf(trial)}
      ${trial.error && html`<details><summary>why it failed</summary><pre>${trial.error}</pre></details>`}
    </td>
    <td class="number wide">${trial.runs}</td>
    <td class="number wide">${trial.train_s === null ? "–" : duration(trial.train_s)}</td>
  </tr>`;
}

function Trials({ list, trials }) {
  const [rows, setRows] = useState(ROWS);
  const best = trials[0]?.value !== null && trials[0]?.state !== "failed" ? trials[0] : undefined;
  const objective = `${list.metric} (${list.mode === "max" ? "greatest" : "least"} is best)`;
  return html`<h2 id="trials">Trials by ${objective}</h2>
    <div class="scroll"><table class="trials">
      <thead>
        <tr>
          <th scope="col">Trial</th><th scope="col">State</th><th scope="col" class="number">${list.value} ${list.metric}</th>
          <th scope="col" class="number wide">Best so far</th>
          <th scope="col" class="number wide">Training loss, last step</th><th scope="col" class="number">Step</th>
          <th scope="col">Parameters</th>
          <th scope="col" class="number wide">Runs</th><th scope="col" class="number wide">Trained</th>
        </tr>
      </thead>
      <tbody>
        ${trials
          .slice(0, rows)
          .map((trial) => html`<${Trial} key=${trial.number} trial=${trial} isBest=${trial === best} />`)}
      </tbody>
    </table></div>
    ${rows < trials.length && html`<button onClick=${() => setRows(rows + ROWS)}>Show more trials</button>`}`;
}

async function load(id, signal) {
  const path = `jobs/${encodeURIComponent(id)}`;
  const [list, { slices }] = await Promise.all([get(`${path}/trials`, {}, signal), get(`${path}/slices`, {}, signal)]);
  const limit = Math.max(20, Math.min(200, Math.floor(POINTS_OF_ALL / Math.max(list.trials.length, 1))));
  const { losses } = await get(`${path}/losses`, { limit }, signal);
  return { list, slices, losses, trials: byValue(list.trials, list.mode) };
}

function Progress({ found, active }) {
  const { list, slices, losses, trials } = found;
  const ended = trials.filter((trial) => ["finished", "stopped", "failed"].includes(trial.state)).length;
  const text = `${ended} of ${list.trial_count} trials have ended`;
  const part = list.trial_count ? ended / list.trial_count : 0;
  return html`<p class="now"><${Bar} part=${part} label="trials that have ended" text=${text} /> ${text}</p>
    <${TrialCurves} losses=${losses} trials=${trials} />
    <${Timeline} slices=${slices} active=${active} />`;
}

export function Search({ id, active, where }) {
  const { data, error } = useLive((_, signal) => load(id, signal), [id], active);
  return html`<section aria-labelledby="progress">
      <h2 id="progress">Progress</h2>
      ${data === undefined ? html`<${Pending} error=${error} />` : html`<${Progress} found=${data} active=${active} />`}
    </section>
    ${where}
    ${
      data?.trials.length > 0 &&
      html`<section aria-labelledby="trials"><${Trials} list=${data.list} trials=${data.trials} /></section>`
    }`;
}
