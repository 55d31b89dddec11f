# What Perl's Net::Stomp (Debian's package libnet-stomp-perl) does and finds: `perl net_stomp.pl PORT QUEUE` prints one
# line per case of test_clients.py. It knows no heart-beats.

use strict;
use warnings;
use Net::Stomp;

$| = 1;
my ($port, $queue) = @ARGV;

# What comes first.
sub take {
    my ($client, $name, $ack, $count) = @_;
    $client->subscribe({ destination => "/queue/$queue.$name", id => $name, ack => $ack });
    return map { $client->receive_frame } 1 .. $count;
}

sub leave {
    my ($client, $name) = @_;
    $client->unsubscribe({ id => $name });
}

sub post {
    my ($client, $name, $body, %headers) = @_;
    $client->send_with_receipt(
        { destination => "/queue/$queue.$name", body => $body, persistent => 'true', %headers }
    ) or die "not confirmed: $body\n";
}

sub say_taken {
    my ($name, @taken) = @_;
    print "$name: ", join(' ', map { $_->body } @taken), "\n";
}

my $client = Net::Stomp->new({ hostname => '127.0.0.1', port => $port, timeout => 20 });
my $connected = $client->connect({ login => '', passcode => '', 'accept-version' => '1.0,1.1', host => '/' });
die 'not connected' unless $connected->command eq 'CONNECTED';

post($client, 'auto', 'low', priority => 1);
post($client, 'auto', 'high', priority => 9);
my @taken = take($client, 'auto', 'auto', 2);
leave($client, 'auto');
say_taken('auto', @taken);

for my $ack ('client', 'client-individual') {
    post($client, $ack, $_) for 1 .. 3;
    @taken = take($client, $ack, $ack, 3);
    $client->ack({ frame => $taken[1], subscription => $ack });
    leave($client, $ack);
    say_taken($ack, @taken);
}

for my $end ('commit', 'abort') {
    post($client, "$end.from", 'taken');
    @taken = take($client, "$end.from", 'client-individual', 1);
    $client->send_frame(Net::Stomp::Frame->new({ command => 'BEGIN', headers => { transaction => 't' } }));
    $client->ack({ frame => $taken[0], subscription => "$end.from", transaction => 't' });
    post($client, "$end.to", 'sent', transaction => 't');
    # Now, as whatever comes next is the receipt to Net::Stomp: it must not be the message once more.
    leave($client, "$end.from");
    $client->send_frame(Net::Stomp::Frame->new({ command => uc $end, headers => { transaction => 't' } }));
    say_taken($end, @taken);
}

post($client, 'receipt', 'confirmed');
print "receipt: came\n";
$client->disconnect;
