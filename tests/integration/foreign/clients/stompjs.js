// What @stomp/stompjs, from npm, does and finds over TCP (@stomp/tcp-wrapper): `node stompjs.js PORT QUEUE BEAT_MS`
// prints one line per case of test_clients.py.
'use strict';

const {Client} = require('@stomp/stompjs');
const {TCPWrapper} = require('@stomp/tcp-wrapper');

const [port, queue, beatMs] = process.argv.slice(2);
let receipts = 0;

function fail(what) {
  console.error(what);
  process.exit(1);
}

function connect(options) {
  return new Promise((resolve) => {
    const client = new Client({
      webSocketFactory: () => new TCPWrapper('127.0.0.1', Number(port)),
      reconnectDelay: 0,
      onStompError: (frame) => fail(`${frame.headers.message}\n${frame.body}`),
      onConnect: () => resolve(client),
      ...options,
    });
    client.activate();
  });
}

// The promise is kept once the receipt has come.
function confirmed(client, act) {
  return new Promise((resolve) => {
    const receipt = `receipt-${(receipts += 1)}`;
    client.watchForReceipt(receipt, resolve);
    act({receipt});
  });
}

function send(client, name, body, headers = {}) {
  return confirmed(client, (receipt) => {
    const destination = `/queue/${queue}.${name}`;
    client.publish({destination, body, headers: {persistent: 'true', ...receipt, ...headers}});
  });
}

// What comes first, and the subscription from which it came.
function take(client, name, ack, count) {
  return new Promise((resolve) => {
    const taken = [];
    const subscription = client.subscribe(
      `/queue/${queue}.${name}`,
      (message) => {
        taken.push(message);
        if (taken.length === count) {
          resolve([[...taken], subscription]);
        }
      },
      {ack},
    );
  });
}

function say(name, taken) {
  console.log(`${name}: ${taken.map(({body}) => body).join(' ')}`);
}

async function main() {
  let client = await connect({});

  await send(client, 'auto', 'low', {priority: '1'});
  await send(client, 'auto', 'high', {priority: '9'});
  let [taken, subscription] = await take(client, 'auto', 'auto', 2);
  subscription.unsubscribe();
  say('auto', taken);

  for (const ack of ['client', 'client-individual']) {
    for (const body of ['1', '2', '3']) {
      await send(client, ack, body);
    }
    [taken, subscription] = await take(client, ack, ack, 3);
    taken[1].ack();
    subscription.unsubscribe();
    say(ack, taken);
  }

  for (const end of ['commit', 'abort']) {
    await send(client, `${end}.from`, 'taken');
    [taken, subscription] = await take(client, `${end}.from`, 'client-individual', 1);
    const transaction = client.begin();
    taken[0].ack({transaction: transaction.id});
    const headers = {transaction: transaction.id, persistent: 'true'};
    client.publish({destination: `/queue/${queue}.${end}.to`, body: 'sent', headers});
    transaction[end]();
    subscription.unsubscribe();
    say(end, taken);
  }

  await send(client, 'receipt', 'confirmed');
  console.log('receipt: came');
  await client.deactivate();

  client = await connect({heartbeatIncoming: Number(beatMs), heartbeatOutgoing: Number(beatMs)});
  const coming = take(client, 'heart-beat', 'auto', 1);
  await new Promise((resolve) => setTimeout(resolve, 3 * beatMs));
  await send(client, 'heart-beat', 'alive');
  [taken] = await coming;
  say('heart-beat', taken);
  process.stdin.on('end', () => client.deactivate()).resume();
}

main().catch(fail);
