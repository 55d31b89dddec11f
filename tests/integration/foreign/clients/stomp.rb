# What Ruby's stomp gem (Debian's package ruby-stomp) does and finds: `ruby stomp.rb PORT QUEUE BEAT_MS` prints one line
# per case of test_clients.py.

require "stomp"

$stdout.sync = true
PORT, QUEUE, BEAT_MS = ARGV

def connect(headers = {})
  Stomp::Client.new(
    hosts: [{ login: "", passcode: "", host: "127.0.0.1", port: PORT.to_i }],
    reliable: false,
    connect_headers: { "accept-version" => "1.1,1.2", "host" => "127.0.0.1" }.merge(headers),
  )
end

def publish(client, name, body, headers = {})
  receipts = Queue.new
  client.publish("/queue/#{QUEUE}.#{name}", body, { persistent: true }.merge(headers)) { |receipt| receipts << receipt }
  receipts.pop
end

# What comes first.
def take(client, name, ack, count)
  messages = Queue.new
  client.subscribe("/queue/#{QUEUE}.#{name}", ack: ack, id: name) { |message| messages << message }
  Array.new(count) { messages.pop }
end

def leave(client, name)
  client.unsubscribe("/queue/#{QUEUE}.#{name}", id: name)
end

def say(name, taken)
  puts "#{name}: #{taken.map(&:body).join(' ')}"
end

client = connect

publish(client, "auto", "low", priority: 1)
publish(client, "auto", "high", priority: 9)
taken = take(client, "auto", "auto", 2)
leave(client, "auto")
say("auto", taken)

%w[client client-individual].each do |ack|
  %w[1 2 3].each { |body| publish(client, ack, body) }
  taken = take(client, ack, ack, 3)
  client.ack(taken[1])
  leave(client, ack)
  say(ack, taken)
end

%w[commit abort].each do |ending|
  publish(client, "#{ending}.from", "taken")
  taken = take(client, "#{ending}.from", "client-individual", 1)
  client.begin("t")
  # Not its :transaction alone: in an abort the gem would hand what was acknowledged to the block again by itself.
  client.ack(taken[0], "transaction" => "t")
  publish(client, "#{ending}.to", "sent", transaction: "t")
  client.public_send(ending, "t")
  leave(client, "#{ending}.from")
  say(ending, taken)
end

publish(client, "receipt", "confirmed")
puts "receipt: came"
client.close

client = connect("heart-beat" => "#{BEAT_MS},#{BEAT_MS}")
messages = Queue.new
client.subscribe("/queue/#{QUEUE}.heart-beat", ack: "auto", id: "heart-beat") { |message| messages << message }
sleep(3 * BEAT_MS.to_i / 1000.0)
publish(client, "heart-beat", "alive")
say("heart-beat", [messages.pop])
$stdin.read
client.close
