/** Numbers and times for people. */

import { html, useEffect, useState } from "./vendor/htm-preact.js";

const STEPS = [
  [60, 1, "s"],
  [3600, 60, "min"],
  [48 * 3600, 3600, "h"],
  [Infinity, 86400, "d"],
];

/** Seconds as `42 s`, `3.5 min`, `7 h`, `3 d`. */
export function duration(seconds) {
  const amount = Math.max(seconds, 0);
  const [, unit, name] = STEPS.find(([limit]) => amount < limit);
  const value = amount / unit;
  return `${value < 10 && unit > 1 ? Math.round(10 * value) / 10 : Math.round(value)} ${name}`;
}

/** Four significant digits; "–" for null. */
export function figure(value) {
  if (value === null || value === undefined) return "–";
  if (value !== 0 && (Math.abs(value) < 1e-5 || Math.abs(value) >= 1e15)) return value.toExponential(3);
  return value.toLocaleString("en", Number.isInteger(value) ? {} : { maximumSignificantDigits: 4 });
}

/** "1 worker", "2 workers". */
export function counted(number, one) {
  return `${figure(Math.round(100 * number) / 100)} ${one}${number === 1 ? "" : "s"}`;
}

/** A size in bytes as `12 B`, `3.4 KiB`. */
export function bytes(size) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let amount = size;
  let unit = 0;
  while (amount >= 1024 && unit < units.length - 1) {
    amount /= 1024;
    unit += 1;
  }
  return `${unit ? amount.toFixed(1) : amount} ${units[unit]}`;
}

const IN_MIB = ["mem", "disk"];

/** An amount of a resource; memory and disk come in MiB. */
export function amount(name, value) {
  if (!IN_MIB.includes(name)) return figure(Math.round(100 * value) / 100);
  return value < 1024 ? `${Math.round(value)} MiB` : `${figure(Math.round(value / 102.4) / 10)} GiB`;
}

/** The used part of a total, in the total's unit. */
export function share(name, used, total) {
  const isInGib = IN_MIB.includes(name) && total >= 1024;
  const part = isInGib ? figure(Math.round(used / 102.4) / 10) : amount(name, used).split(" ")[0];
  return `${part} of ${amount(name, total)}`;
}

const DAY = { hourCycle: "h23" };

/** Time since a moment (seconds since the epoch), with the date as a tooltip. */
export function Ago({ at }) {
  const [, redraw] = useState(0);
  useEffect(() => {
    const timer = setInterval(() => redraw((count) => count + 1), 5000);
    return () => clearInterval(timer);
  }, []);
  if (at === null || at === undefined) return "–";
  const date = new Date(1000 * at);
  const past = duration(Date.now() / 1000 - at);
  return html`<time datetime=${date.toISOString()} title=${date.toLocaleString([], DAY)}>${past} ago</time>`;
}

/** Time of day of a moment, with the date as a tooltip. */
export function Clock({ at }) {
  const date = new Date(1000 * at);
  return html`<time datetime=${date.toISOString()} title=${date.toLocaleString([], DAY)}>${date.toLocaleTimeString([], DAY)}</time>`;
}

const COLOURS = 6;
const DASHES = [[], [9, 4], [2, 3]];

/** The CSS variable of a number's colour, of a few that are easy to distinguish. */
export function colour(number) {
  return `--series-${number % COLOURS}`;
}

/** The dash of a number's line, so that lines of one colour differ. */
export function dash(number) {
  return DASHES[Math.floor(number / COLOURS) % DASHES.length];
}

/** A number's colour as a style, for elements drawn with `--colour`. */
export function coloured(number) {
  return { "--colour": `var(${colour(number)})` };
}
