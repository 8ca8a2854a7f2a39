/** Submits a job from two files. */

import { html, useState } from "./vendor/htm-preact.js";
import { post } from "./api.js";

async function submit(form) {
  const files = new FormData(form);
  const body = new FormData();
  body.set("request", JSON.stringify(JSON.parse(await files.get("request").text())));
  body.set("bundle", files.get("bundle"));
  return post("jobs", body);
}

export function SubmitView() {
  const [isBusy, setIsBusy] = useState(false);
  const [failure, setFailure] = useState("");
  const [made, setMade] = useState(null);
  const onSubmit = (event) => {
    event.preventDefault();
    setIsBusy(true);
    setFailure("");
    submit(event.target)
      .then((job) => (job.warnings.length ? setMade(job) : (location.hash = `#/jobs/${encodeURIComponent(job.id)}`)))
      .catch((error) =>
        setFailure(error instanceof SyntaxError ? `The request is no JSON: ${error.message}.` : error.message),
      )
      .finally(() => setIsBusy(false));
  };
  if (made) {
    return html`<h1>Submitted</h1>
      ${made.warnings.map((warning) => html`<p class="alert">${warning}</p>`)}
      <p><a href=${`#/jobs/${encodeURIComponent(made.id)}`}>Go to ${made.id}</a></p>`;
  }
  return html`<h1>Submit a job</h1>
    <p>
      <code>dike submit SCRIPT</code> does it all from the command line. Here it takes the two files that
      ${" "}<code>dike submit --save FOLDER SCRIPT</code> writes: the request, and the archive of the script's
      folder. A job of yours that has ended can be submitted again from its own view.
    </p>
    <form class="submit" onSubmit=${onSubmit}>
      <label for="request">Request (.json)</label>
      <input id="request" name="request" type="file" accept=".json,application/json" required />
      <label for="bundle">Bundle (.tar.gz)</label>
      <input id="bundle" name="bundle" type="file" accept=".gz,.tgz,application/gzip" required />
      <button class="primary" disabled=${isBusy}>${isBusy ? "Sending …" : "Submit"}</button>
    </form>
    ${failure && html`<p class="alert" role="alert">${failure}</p>`}`;
}
