// Shows the description that lies beside this page.
'use strict';

window.SwaggerUIBundle({
  url: new URL('openapi.json', document.baseURI).href,
  dom_id: '#api',
  deepLinking: true,
  docExpansion: 'list',
  defaultModelsExpandDepth: 0,
  tryItOutEnabled: true,
  validatorUrl: null,
});
