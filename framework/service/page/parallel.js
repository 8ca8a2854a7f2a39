/** Parallel coordinates of a search's trials: an axis for each parameter and one for the objective. */

import { html, useEffect, useMemo, useRef, useState } from "./vendor/htm-preact.js";
import { suitsLog } from "./curves.js";
import { figure } from "./format.js";

const HEIGHT = 250;
const TOP = 34;
const BOTTOM = 14;
const SIDE = 60;
const MIN_AXIS_WIDTH = 110;
const MAX_LINES = 300;
const CHOICES = 12;
const NAME_LENGTH = 14;

function short(text) {
  const whole = String(text);
  return whole.length > NAME_LENGTH ? `${whole.slice(0, NAME_LENGTH - 1)}…` : whole;
}

/** An axis: the position of a value, from 0 (bottom) to 1 (top), and its tick labels. */
function axisOf(name, values, known) {
  const isNumeric = values.every((value) => typeof value === "number");
  if (known?.choices.length || !isNumeric) {
    const listed = known?.choices.length ? [...known.choices] : [...new Set(values)].sort();
    if (isNumeric) listed.sort((one, other) => one - other);
    const place = (value) => (listed.length < 2 ? 0.5 : listed.indexOf(value) / (listed.length - 1));
    const shown = listed.length <= CHOICES ? listed : [listed[0], listed.at(-1)];
    return { name, place, ticks: shown.map((value) => [place(value), short(value)]) };
  }
  const low = known?.low ?? Math.min(...values);
  const high = known?.high ?? Math.max(...values);
  const isLog = known ? known.log : suitsLog(values);
  const scaled = isLog ? Math.log : (value) => value;
  const length = scaled(high) - scaled(low);
  const place = (value) => (length > 0 ? (scaled(value) - scaled(low)) / length : 0.5);
  const middle = isLog ? Math.sqrt(low * high) : (low + high) / 2;
  const shown = length > 0 ? [low, middle, high] : [low];
  return { name, place, ticks: shown.map((value) => [place(value), figure(Number(value.toPrecision(3)))]) };
}

/** The axes of the parameters with different values, and of the objective. */
function axesOf(trials, space, metric) {
  const names = [...new Set(trials.flatMap((trial) => Object.keys(trial.parameters)))];
  const axes = names
    .map((name) => {
      const values = trials.map((trial) => trial.parameters[name]).filter((value) => value !== undefined);
      const known = space.find((parameter) => parameter.name === name);
      return { ...axisOf(name, values, known), of: (trial) => trial.parameters[name], differ: new Set(values).size > 1 };
    })
    .filter((axis) => axis.differ);
  const values = trials.map((trial) => trial.value);
  return [...axes, { ...axisOf(metric, values), of: (trial) => trial.value, isObjective: true }];
}

/** `trials` are sorted, best first, and all have a value. */
export function Parallel({ trials, space, metric, mode, pointed, onPoint }) {
  const box = useRef(null);
  const [width, setWidth] = useState(0);
  useEffect(() => {
    const sizes = new ResizeObserver(() => setWidth(box.current.clientWidth));
    sizes.observe(box.current);
    return () => sizes.disconnect();
  }, []);
  const shown = trials.slice(0, MAX_LINES);
  const axes = useMemo(() => axesOf(shown, space, metric), [trials, space, metric]);
  const whole = Math.max(width, 2 * SIDE + MIN_AXIS_WIDTH * (axes.length - 1));
  const x = (at) => (axes.length < 2 ? whole / 2 : SIDE + (at * (whole - 2 * SIDE)) / (axes.length - 1));
  const y = (place) => TOP + (1 - place) * (HEIGHT - TOP - BOTTOM);
  const line = (trial) => {
    const points = axes.map((axis, at) => [x(at), axis.of(trial), axis]).filter(([, value]) => value !== undefined);
    return points.map(([left, value, axis], at) => `${at ? "L" : "M"}${left} ${y(axis.place(value))}`).join("");
  };
  const merit = (trial) => {
    const place = axes.at(-1).place(trial.value);
    return Math.round(100 * (mode === "max" ? place : 1 - place));
  };
  const best = shown[0];
  const said = axes
    .filter((axis) => axis.of(best) !== undefined)
    .map((axis) => `${axis.name} ${typeof axis.of(best) === "number" ? figure(axis.of(best)) : axis.of(best)}`);
  const cut = shown.length < trials.length ? ` Only the best ${MAX_LINES} trials are drawn.` : "";
  const draw = (trial) => html`<path
    key=${trial.number} d=${line(trial)} style=${{ "--merit": `${merit(trial)}%` }}
    class=${[trial === best ? "best" : "", trial.number === pointed ? "pointed" : ""].join(" ")}
    onMouseEnter=${() => onPoint(trial.number)} onMouseLeave=${() => onPoint(null)} />`;
  return html`<figure class="parallel">
    <figcaption>Parameters and ${metric} of each trial</figcaption>
    <p class="quiet">
      A line is a trial, and crosses each axis at its value. The more blue, the better its ${metric}; the thick line is the
      best trial.${cut}
    </p>
    <div class="scroll" ref=${box} tabindex="0" role="group" aria-label="picture of parameters">
      <svg width=${whole} height=${HEIGHT} role="img"
        aria-label=${`parallel coordinates of ${shown.length} trials; the best, trial ${best.number}: ${said.join(", ")}`}>
        ${shown.toReversed().map(draw)}
        ${axes.map(
          (axis, at) => html`<g key=${axis.name} class=${axis.isObjective ? "axis objective" : "axis"}>
          <line x1=${x(at)} x2=${x(at)} y1=${y(0)} y2=${y(1)} />
          <text class="name" x=${x(at)} y="14" text-anchor="middle">${short(axis.name)}</text>
          ${axis.ticks.map(
            ([place, text]) => html`<text x=${x(at) + 5} y=${y(place)} dominant-baseline="middle">${text}</text>`,
          )}
        </g>`,
        )}
      </svg>
    </div>
  </figure>`;
}

/** The importance of each parameter, as bars. */
export function Importance({ found }) {
  const entries = Object.entries(found.importances);
  if (!entries.length) {
    return html`<p class="quiet">
      Which parameters matter is shown once ${found.needed} trials have finished; ${found.trials} have.
    </p>`;
  }
  const percent = (share) => `${Math.round(100 * share)}%`;
  return html`<figure class="importance">
    <figcaption>Importance of the parameters</figcaption>
    <p class="quiet">How much of the difference between good and other trials each explains (PED-ANOVA, ${found.trials} trials).</p>
    <dl>
      ${entries.map(
        ([name, share]) => html`<div key=${name}>
        <dt>${name}</dt>
        <dd><span class="share" aria-hidden="true"><span style=${{ width: percent(share) }}></span></span> ${percent(share)}</dd>
      </div>`,
      )}
    </dl>
  </figure>`;
}
