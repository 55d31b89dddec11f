// What stompit, from npm, does and finds: `node stompit.js PORT QUEUE BEAT_MS` prints one line per case of
// test_clients.py.
'use strict';

const stompit = require('stompit');

const [port, queue, beatMs] = process.argv.slice(2);

function connect(headers) {
  return new Promise((resolve, reject) => {
    const options = {host: '127.0.0.1', port, connectHeaders: {host: '/', ...headers}};
    stompit.connect(options, (error, client) => (error ? reject(error) : resolve(client)));
  });
}

// The promise is kept once the receipt has come.
function confirmed(act) {
  return new Promise((resolve, reject) => act({onReceipt: resolve, onError: reject}));
}

function send(client, name, body, headers = {}) {
  return confirmed((options) => {
    client.send({destination: `/queue/${queue}.${name}`, persistent: 'true', ...headers}, options).end(body);
  });
}

// What comes first, and the subscription from which it came.
function take(client, name, ack, count) {
  return new Promise((resolve, reject) => {
    const taken = [];
    const headers = {destination: `/queue/${queue}.${name}`, ack};
    const subscription = client.subscribe(headers, (error, message) => {
      if (error) {
        reject(error);
        return;
      }
      message.readString('utf-8', (failure, body) => {
        taken.push({message, body});
        if (failure) {
          reject(failure);
        } else if (taken.length === count) {
          resolve([[...taken], subscription]);
        }
      });
    });
  });
}

function say(name, taken) {
  console.log(`${name}: ${taken.map(({body}) => body).join(' ')}`);
}

async function main() {
  let client = await connect({});

  await send(client, 'auto', 'low', {priority: 1});
  await send(client, 'auto', 'high', {priority: 9});
  let [taken, subscription] = await take(client, 'auto', 'auto', 2);
  subscription.unsubscribe();
  say('auto', taken);

  for (const ack of ['client', 'client-individual']) {
    for (const body of ['1', '2', '3']) {
      await send(client, ack, body);
    }
    [taken, subscription] = await take(client, ack, ack, 3);
    client.ack(taken[1].message);
    subscription.unsubscribe();
    say(ack, taken);
  }

  for (const end of ['commit', 'abort']) {
    await send(client, `${end}.from`, 'taken');
    [taken, subscription] = await take(client, `${end}.from`, 'client-individual', 1);
    const transaction = client.begin();
    client.ack(taken[0].message, {transaction: transaction.id});
    transaction.send({destination: `/queue/${queue}.${end}.to`, persistent: 'true'}).end('sent');
    await confirmed((options) => transaction[end](options));
    subscription.unsubscribe();
    say(end, taken);
  }

  await send(client, 'receipt', 'confirmed');
  console.log('receipt: came');
  await new Promise((resolve) => client.disconnect(resolve));

  client = await connect({'heart-beat': `${beatMs},${beatMs}`});
  const coming = take(client, 'heart-beat', 'auto', 1);
  await new Promise((resolve) => setTimeout(resolve, 3 * beatMs));
  await send(client, 'heart-beat', 'alive');
  [taken] = await coming;
  say('heart-beat', taken);
  process.stdin.on('end', () => client.disconnect(() => process.exit())).resume();
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
