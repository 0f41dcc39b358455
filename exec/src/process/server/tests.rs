use super::*;
use std::io::Write;

/// Longer than the store takes to notice the end of a connection.
const A_WHILE: Duration = Duration::from_millis(200);

fn listener() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").unwrap()
}

/// Returns a store for two processes.
fn store(listener: TcpListener) -> Server {
    let options = StoreOptions::new(2, "run", Duration::from_secs(60));
    Server::start(listener, options).unwrap()
}

/// Returns a connection of rank 1 that has sent its hello.
fn connect(address: SocketAddr, instance: u64, number: u32) -> TcpStream {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.write_all(MAGIC).unwrap();
    let hello = Request::Hello {
        process: 1,
        processes: 2,
        run: "run".to_owned(),
        location: format!("host, process {instance}"),
        attempt: Attempt { instance, number },
    };
    send(&mut stream, &hello);
    stream
}

fn send(stream: &mut TcpStream, message: &Request) {
    protocol::write(stream, &message.encode()).unwrap();
}

fn receive(stream: &mut TcpStream) -> Option<Response> {
    let limit = Some(Duration::from_secs(20));
    stream.set_read_timeout(limit).unwrap();
    protocol::read(stream)
        .ok()
        .and_then(|f| Response::decode(&f))
}

fn is_welcome(stream: &mut TcpStream) -> bool {
    matches!(receive(stream), Some(Response::Welcome { .. }))
}

/// The process is welcome, and receives messages from the store.
fn is_connected(stream: &mut TcpStream) {
    assert!(is_welcome(stream));
    let beat = Request::Heartbeat {
        progress: 0,
        running: 0,
        ranks: Vec::new(),
    };
    send(stream, &beat);
    assert_eq!(receive(stream), Some(Response::Alive));
}

#[test]
fn an_attempt_replaces_an_abandoned_one() {
    let server = store(listener());
    let mut abandoned = connect(server.address(), 7, 1);
    assert!(is_welcome(&mut abandoned));
    let mut stream = connect(server.address(), 7, 2);
    is_connected(&mut stream);
    // The store closes the abandoned connection, and the process may do so as well.
    assert_eq!(receive(&mut abandoned), None);
    drop(abandoned);
    std::thread::sleep(A_WHILE);
    assert_eq!(server.failure(), None);
    send(
        &mut stream,
        &Request::Put {
            key: "k".to_owned(),
            uses: 0,
            data: vec![4],
        },
    );
    send(
        &mut stream,
        &Request::Get {
            request: 3,
            key: "k".to_owned(),
            slow: false,
        },
    );
    let answer = Response::Answer {
        request: 3,
        parts: vec![vec![4]],
    };
    assert_eq!(receive(&mut stream), Some(answer));
    // Another process that claims the same rank is rejected.
    let refused = receive(&mut connect(server.address(), 8, 3));
    let why = "two processes claim to be rank 1: one on host, process 7, one on host, process 8";
    assert_eq!(
        refused,
        Some(Response::Refused {
            why: why.to_owned()
        })
    );
    // Now it dies.
    drop(stream);
    std::thread::sleep(A_WHILE);
    let died = "rank 1 (host, process 7) died: its connection was closed";
    assert_eq!(server.failure(), Some((1, died.to_owned())));
}

/// A store that was suspended reads several attempts at once, in any order.
#[test]
fn a_slow_store_admits_the_last_attempt() {
    for _ in 0..20 {
        let listener = listener();
        let address = listener.local_addr().unwrap();
        drop(connect(address, 7, 1));
        let abandoned = connect(address, 7, 2);
        let mut stream = connect(address, 7, 3);
        let server = store(listener);
        is_connected(&mut stream);
        drop(abandoned);
        std::thread::sleep(A_WHILE / 4);
        assert_eq!(server.failure(), None);
    }
}
