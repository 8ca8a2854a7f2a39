/** Small components shared by the views. */

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";

export const ENDED = ["finished", "failed", "killed"];

/** A state; `text` describes it in more detail. */
export function Badge({ state, text = state }) {
  return html`<span class=${`badge state-${state}`}>${text}</span>`;
}

/** A bar filled by `part` (0 to 1). */
export function Bar({ part, label, text }) {
  const percent = Math.round(100 * Math.min(Math.max(part, 0), 1));
  const said = {
    "aria-label": label,
    "aria-valuenow": percent,
    "aria-valuemin": 0,
    "aria-valuemax": 100,
    "aria-valuetext": text,
  };
  return html`<span class="bar" role="meter" ...${said}><span style=${{ width: `${percent}%` }}></span></span>`;
}

export function FactList({ facts }) {
  const entry = ([name, value]) => html`<div><dt>${name}</dt><dd>${value}</dd></div>`;
  return html`<dl class="facts">${facts.map(entry)}</dl>`;
}

async function copy(text, element) {
  try {
    await navigator.clipboard.writeText(text);
  } catch {
    // Browsers allow the clipboard API only with TLS or on localhost.
    getSelection().selectAllChildren(element);
    document.execCommand("copy");
  }
}

/** A text, such as a command, with a button to copy it. */
export function Copyable({ label, text }) {
  const [isCopied, setIsCopied] = useState(false);
  const code = useRef(null);
  useEffect(() => setIsCopied(false), [text]);
  const onClick = () => copy(text, code.current).then(() => setIsCopied(true));
  return html`<div class="copyable">
    <span class="quiet">${label}</span> <code ref=${code}>${text}</code>
    ${" "}<button onClick=${onClick} aria-label=${`Copy: ${label}`}>Copy</button>
    ${" "}<span role="status">${isCopied ? "copied" : ""}</span>
  </div>`;
}

/** Shown until data is loaded, or the error if that failed. */
export function Pending({ error }) {
  return error?.status
    ? html`<p class="alert" role="alert">${error.message}</p>`
    : html`<p class="quiet">Asking the service …</p>`;
}

/** Asks for confirmation of an irreversible action; open while mounted. */
export function Confirm({ question, yes, onYes, onNo }) {
  const dialog = useRef(null);
  useEffect(() => dialog.current.showModal(), []);
  return html`<dialog ref=${dialog} onClose=${onNo} aria-labelledby="question">
    <p id="question">${question}</p>
    <form method="dialog">
      <button autofocus>Cancel</button>
      <button class="danger" onClick=${onYes}>${yes}</button>
    </form>
  </dialog>`;
}
