// A certified OpenID Connect provider for tests: `node provider.mjs FOLDER REDIRECT_URI`, where FOLDER has
// its node_modules. It prints its issuer. Each line of its input is JSON, and replaces its accounts:
// {"ada": {"email": "ada@example.org", "groups": ["staff"]}}. Any password is right.
import { createServer } from 'node:http';
import { createInterface } from 'node:readline';
import { pathToFileURL } from 'node:url';

const [folder, redirectUri] = process.argv.slice(2);
const module = pathToFileURL(`${folder}/node_modules/oidc-provider/lib/index.js`);
const { default: Provider } = await import(module.href);

console.info = console.warn = console.error; // the provider's notices are not for the tests

let accounts = {};
createInterface({ input: process.stdin })
  .on('line', (line) => { accounts = JSON.parse(line); console.log('accounts'); })
  .on('close', () => process.exit(0));

const server = createServer();
server.listen(0, '127.0.0.1', () => {
  const issuer = `http://127.0.0.1:${server.address().port}`;
  const provider = new Provider(issuer, {
    clients: [{
      client_id: 'headrace',
      client_secret: 'a-secret-of-the-client',
      redirect_uris: [redirectUri],
      grant_types: ['authorization_code'],
      response_types: ['code'],
    }],
    claims: { openid: ['sub'], email: ['email', 'email_verified'], profile: ['name', 'groups'] },
    pkce: { required: () => true },
    cookies: { keys: ['for-tests-alone'] },
    findAccount: (_, id) => accounts[id] && {
      accountId: id,
      claims: () => ({ sub: id, email_verified: true, name: id, ...accounts[id] }),
    },
  });
  server.on('request', provider.callback());
  console.log(issuer);
});
