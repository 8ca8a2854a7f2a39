/** The timeline of a search: a row for each slot, a box for each time slice, coloured by trial. */

import { html } from "./vendor/htm-preact.js";
import { now as lastKnown } from "./api.js";
import { coloured, duration, figure } from "./format.js";

const MAX_SLICES = 2000;
const TICKS = 6;
const STEPS_S = [
  1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800,
];

/** Ticks of the axis in seconds; none too close to the end for its label. */
function ticks(length) {
  const step = STEPS_S.find((candidate) => length / candidate <= TICKS) ?? Math.ceil(length / TICKS);
  return Array.from({ length: Math.floor((0.95 * length) / step) + 1 }, (_, index) => index * step);
}

function tickText(tick, length) {
  if (length <= 120) return `${tick} s`;
  return length < 7200 ? `${Math.floor(tick / 60)}:${String(tick % 60).padStart(2, "0")}` : duration(tick);
}

function Slice({ slice, from, length, now }) {
  const end = slice.end_s ?? now;
  const percent = (seconds) => `${(100 * seconds) / length}%`;
  const preparing = Math.min(slice.first_step_s ?? end, end) - slice.start_s;
  const share = end > slice.start_s ? (100 * preparing) / (end - slice.start_s) : 0;
  const said = [
    `trial ${slice.trial}, run ${slice.run}: ${duration(end - slice.start_s)}${slice.end_s === null ? " so far" : ""}`,
    `steps ${slice.from_step} to ${slice.to_step}`,
    slice.outcome,
    slice.reason,
    slice.process === "continued" ? "resumed its paused process" : "",
    slice.samples_per_s === null ? "" : `${figure(slice.samples_per_s)} samples/s`,
  ];
  const style = {
    left: percent(slice.start_s - from),
    width: percent(end - slice.start_s),
    ...coloured(slice.trial),
    "--share": `${share}%`,
  };
  return html`<span class=${slice.end_s === null ? "slice running" : "slice"} title=${said.filter(Boolean).join("; ")}
    style=${style}>${slice.trial}</span>`;
}

export function Timeline({ slices, active }) {
  if (!slices.length) return null;
  const shown = slices.slice(-MAX_SLICES);
  const last = Math.max(...shown.map((slice) => slice.end_s ?? 0));
  const now = active ? lastKnown() : last;
  const from = Math.min(...shown.map((slice) => slice.start_s));
  const until = Math.max(now, last);
  const length = Math.max(until - from, 1);
  const slots = [...new Set(shown.map((slice) => slice.slot))].sort((one, other) => one - other);
  const agents = new Map(shown.map((slice) => [slice.slot, slice.agent]));
  const cut = shown.length < slices.length ? ` Only the last ${MAX_SLICES} are shown.` : "";
  const said = (slot, ours) => `slot ${slot}: trials ${ours.map((slice) => slice.trial).join(", ")}`;
  const draw = (slice) =>
    html`<${Slice} key=${`${slice.trial}-${slice.run}`} slice=${slice} from=${from} length=${length} now=${until} />`;
  const drawTick = (tick) =>
    html`<span class="tick" style=${{ left: `${(100 * tick) / length}%` }}>${tickText(tick, length)}</span>`;
  return html`<h3>Slots</h3>
    <p class="quiet">A box is a stretch of a trial's training; its number and colour say which trial. Pale: it is still starting.${cut}</p>
    <div class="timeline">
      ${slots.map((slot) => {
        const ours = shown.filter((slice) => slice.slot === slot);
        return html`<div class="slot" key=${slot}>
          <span class="slot-name" title=${agents.get(slot)}>
            slot ${slot} <span class="quiet">${agents.get(slot)}</span>
          </span>
          <span class="slot-row" role="img" aria-label=${said(slot, ours)}>
            ${ours.map(draw)}
          </span>
        </div>`;
      })}
      <div class="slot axis" aria-hidden="true">
        <span class="slot-name"></span>
        <span class="slot-row">${ticks(length).map(drawTick)}</span>
      </div>
    </div>`;
}
