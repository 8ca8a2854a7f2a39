/** Swagger UI for the REST API, with the token of this tab, if signed in. */

import { token } from "./api.js";

const spec = await (await fetch("openapi.json")).json();
// Behind a proxy the service may be at any path.
spec.servers = [{ url: new URL(".", location.href).href.replace(/\/$/, "") }];
const ui = SwaggerUIBundle({
  spec,
  dom_id: "#swagger-ui",
  validatorUrl: null,
  onComplete: () => token() && ui.preauthorizeApiKey("HTTPBearer", token()),
});
