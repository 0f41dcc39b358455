use super::*;
use std::io::Write;

/// Longer than the store takes to notice an end.
const A_WHILE: Duration = Duration::from_millis(200);

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

/// A store of two.
fn store(listener: TcpListener) -> Server {
    let options = StoreOptions::new(2, "run", Duration::from_secs(60));
    Server::start(listener, options).unwrap()
}

/// A connection of rank 1 that has said who it is.
fn greet(address: SocketAddr, instance: u64, number: u32) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(MAGIC).unwrap();
    let hello = Ask::Hello {
        process: 1,
        processes: 2,
        run: "run".to_owned(),
        place: format!("host, process {instance}"),
        attempt: Attempt { instance, number },
    };
    say(&mut stream, &hello);
    stream
}

fn say(stream: &mut TcpStream, ask: &Ask) {
    wire::write(stream, &ask.encode()).unwrap();
}

fn hear(stream: &mut TcpStream) -> Option<Tell> {
    let limit = Some(Duration::from_secs(20));
    stream.set_read_timeout(limit).unwrap();
    wire::read(stream).ok().and_then(|f| Tell::decode(&f))
}

fn is_welcome(stream: &mut TcpStream) -> bool {
    matches!(hear(stream), Some(Tell::Welcome { .. }))
}

/// It is let in, and what the store says reaches it.
fn lives(stream: &mut TcpStream) {
    assert!(is_welcome(stream));
    let beat = Ask::Beat {
        progress: 0,
        running: 0,
        standing: Vec::new(),
    };
    say(stream, &beat);
    assert_eq!(hear(stream), Some(Tell::Alive));
}

#[test]
fn an_attempt_replaces_the_one_that_was_given_up() {
    let server = store(listener());
    let mut given_up = greet(server.address(), 7, 1);
    assert!(is_welcome(&mut given_up));
    let mut stream = greet(server.address(), 7, 2);
    lives(&mut stream);
    // The store ends it, and so may the process.
    assert_eq!(hear(&mut given_up), None);
    drop(given_up);
    std::thread::sleep(A_WHILE);
    assert_eq!(server.failure(), None);
    say(
        &mut stream,
        &Ask::Put {
            key: "k".to_owned(),
            uses: 0,
            data: vec![4],
        },
    );
    say(
        &mut stream,
        &Ask::Get {
            request: 3,
            key: "k".to_owned(),
            patient: false,
        },
    );
    let answer = Tell::Answer {
        request: 3,
        parts: vec![vec![4]],
    };
    assert_eq!(hear(&mut stream), Some(answer));
    // Another process of this rank is refused.
    let refused = hear(&mut greet(server.address(), 8, 3));
    let why = "two processes claim to be rank 1: one on host, process 7, one on host, process 8";
    assert_eq!(
        refused,
        Some(Tell::Refused {
            why: why.to_owned()
        })
    );
    // Now it dies.
    drop(stream);
    std::thread::sleep(A_WHILE);
    let died = "rank 1 (host, process 7) died: its connection was closed";
    assert_eq!(server.failure(), Some((1, died.to_owned())));
}

/// As after a stop of the store: it reads both at once, in any order.
#[test]
fn a_store_that_was_slow_lets_the_last_attempt_in() {
    for _ in 0..20 {
        let listener = listener();
        let address = listener.local_addr().unwrap();
        drop(greet(address, 7, 1));
        let given_up = greet(address, 7, 2);
        let mut stream = greet(address, 7, 3);
        let server = store(listener);
        lives(&mut stream);
        drop(given_up);
        std::thread::sleep(A_WHILE / 4);
        assert_eq!(server.failure(), None);
    }
}
