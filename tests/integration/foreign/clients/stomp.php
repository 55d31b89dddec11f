<?php
// What PHP's stomp extension (Debian's package php-stomp) does and finds: `php stomp.php PORT QUEUE` prints one line per
// case of test_clients.py. It knows no heart-beats: its silence must not end the connection.

[, $port, $queue] = $argv;

function connect(): Stomp
{
    global $port;
    $client = new Stomp("tcp://127.0.0.1:$port");
    $client->setReadTimeout(20);
    return $client;
}

// With a receipt in its headers, send returns once that has come.
function send(Stomp $client, string $name, string $body, array $headers = []): void
{
    global $queue;
    static $receipts = 0;
    $receipts += 1;
    $headers += ['persistent' => 'true', 'receipt' => "receipt-$receipts"];
    if (!$client->send("/queue/$queue.$name", $body, $headers)) {
        throw new Exception('not confirmed: ' . $client->error());
    }
}

// What comes first.
function take(Stomp $client, string $name, string $ack, int $count): array
{
    global $queue;
    $client->subscribe("/queue/$queue.$name", ['ack' => $ack, 'id' => $name]);
    return array_map(fn () => $client->readFrame(), range(1, $count));
}

function leave(Stomp $client, string $name): void
{
    global $queue;
    $client->unsubscribe("/queue/$queue.$name", ['id' => $name]);
}

function say(string $name, array $taken): void
{
    echo "$name: ", implode(' ', array_map(fn ($frame) => $frame->body, $taken)), "\n";
}

$client = connect();

send($client, 'auto', 'low', ['priority' => '1']);
send($client, 'auto', 'high', ['priority' => '9']);
$taken = take($client, 'auto', 'auto', 2);
leave($client, 'auto');
say('auto', $taken);

foreach (['client', 'client-individual'] as $ack) {
    foreach (['1', '2', '3'] as $body) {
        send($client, $ack, $body);
    }
    $taken = take($client, $ack, $ack, 3);
    $client->ack($taken[1]);
    leave($client, $ack);
    say($ack, $taken);
}

foreach (['commit', 'abort'] as $end) {
    send($client, "$end.from", 'taken');
    $taken = take($client, "$end.from", 'client-individual', 1);
    $client->begin('t');
    $client->ack($taken[0], ['transaction' => 't']);
    send($client, "$end.to", 'sent', ['transaction' => 't']);
    $client->$end('t');
    leave($client, "$end.from");
    say($end, $taken);
}

send($client, 'receipt', 'confirmed');
echo "receipt: came\n";
unset($client);
