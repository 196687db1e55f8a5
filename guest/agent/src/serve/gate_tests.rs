use super::*;

fn ready_to_freeze(reply: &Reply) {
    assert!(matches!(reply, Reply::ReadyToFreeze), "{reply:?}");
}

#[test]
fn requests_are_refused_before_an_identity() {
    let guest = TestGuest::start();
    let mut host = guest.connect();
    host.load(ECHO);
    assert_eq!(refused(host.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);
    host.identify(1);
    assert_eq!(host.answer(&json!(1)), json!(1));
}

#[test]
fn freeze_closes_the_gate_until_a_new_identity() {
    let (guest, mut host) = TestGuest::with(ECHO);
    guest.machine.take();
    ready_to_freeze(&host.ask(&Request::PrepareFreeze));
    assert_eq!(guest.machine.take(), ["sync", "settle"]);
    let end = receive::<Reply>(&mut host.0, MAX_REPLY_LENGTH);
    assert!(end.is_err(), "the connection goes on after the reply: {end:?}");

    let mut host = guest.connect();
    assert_eq!(refused(host.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);
    assert_eq!(refused(host.ask(&Request::Load(load(ECHO)))).kind, RefusalKind::Frozen);
    let same = host.ask(&Request::Identify(identity(1)));
    assert_eq!(refused(same).kind, RefusalKind::Frozen, "the generation before the freeze");
    assert_eq!(refused(host.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);

    host.identify(2);
    assert_eq!(guest.machine.take(), ["reseed 32", "clock 5", "host name i-2", "generation 2"]);
    assert_eq!(host.answer(&json!(1)), json!(1));

    let address = "10.0.0.2".parse().unwrap();
    let network = NetworkAddresses { address, prefix: 24, gateway: None, dns: None, ipv6: None };
    let identify = Identify { network: Some(network), ..identity(3) };
    assert!(matches!(host.ask(&Request::Identify(identify)), Reply::Identified));
    let done = guest.machine.take();
    assert_eq!(done[3..], ["address 10.0.0.2/24", "generation 3"]);

    // The address of a metadata service, the same again, and none.
    for (generation, metadata, expected) in [
        (4, Some(Ipv4Addr::LOCALHOST), "metadata Some(127.0.0.1), earlier None"),
        (5, Some(Ipv4Addr::LOCALHOST), "metadata Some(127.0.0.1), earlier Some(127.0.0.1)"),
        (6, None, "metadata None, earlier Some(127.0.0.1)"),
    ] {
        let identify = Identify { metadata, ..identity(generation) };
        assert!(matches!(host.ask(&Request::Identify(identify)), Reply::Identified));
        assert_eq!(guest.machine.take()[3], expected);
    }
    host.identify(7);
    assert_eq!(guest.machine.take()[3], "generation 7");
}

#[test]
fn refused_identity_leaves_the_gate_closed() {
    let (guest, mut host) = TestGuest::with(ECHO);
    let attempts = [
        (Identify { entropy: Base64Bytes(vec![7; 31]), ..identity(2) }, RefusalKind::BadRequest),
        (Identify { entropy: Base64Bytes(vec![7; 513]), ..identity(2) }, RefusalKind::BadRequest),
        (Identify { instance_id: "Big-Name".into(), ..identity(2) }, RefusalKind::BadRequest),
        (Identify { instance_id: "-".into(), ..identity(2) }, RefusalKind::BadRequest),
        (Identify { wall_clock_ns: 0, ..identity(2) }, RefusalKind::System),
    ];
    ready_to_freeze(&host.ask(&Request::PrepareFreeze));
    let mut host = guest.connect();
    for (attempt, kind) in attempts {
        assert_eq!(refused(host.ask(&Request::Identify(attempt))).kind, kind);
        assert_eq!(refused(host.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);
    }
    host.identify(2);
    assert_eq!(host.answer(&json!(1)), json!(1));
}

#[test]
fn freeze_waits_for_requests_in_flight_and_refuses_others() {
    let running = Running::start();
    let mut second = running.guest.connect();
    let mut third = running.guest.connect();
    let freeze = thread::spawn(move || second.ask(&Request::PrepareFreeze));
    let status = |host: &mut Host| match host.ask(&Request::Status) {
        Reply::Status(status) => status,
        other => panic!("{other:?}"),
    };
    while status(&mut third).open {
        thread::yield_now();
    }
    assert_eq!(refused(third.ask_function(&json!(1))).kind, RefusalKind::NotIdentified);
    assert!(!freeze.is_finished());
    running.finish();
    ready_to_freeze(&freeze.join().unwrap());
    let expected = Status {
        agent: env!("CARGO_PKG_VERSION").into(),
        function: Some("test".into()),
        handler: Some("handler.handler".into()),
        open: false,
        instance_id: Some("i-1".into()),
        invocations: 1,
    };
    assert_eq!(status(&mut third), expected);
}

#[test]
fn freeze_restarts_a_runtime_that_had_exited() {
    let (guest, mut host) = TestGuest::with(
        "import os\n\
         born = os.getpid()\n\
         def handler(event, context): os._exit(1) if event else None\n",
    );
    host.failed(&json!(1));
    ready_to_freeze(&host.ask(&Request::PrepareFreeze));
    assert_eq!(guest.connect().identify(2), ());
}

/// Without reseeding, all compared values would be equal in every clone.
#[test]
fn identity_replaces_the_random_state_of_the_running_process() {
    let guest = TestGuest::start();
    let mut host = guest.connect();
    host.load(
        "import os, random, ssl, tempfile, uuid\n\
         random.seed(7)\n\
         node, names = uuid.getnode(), tempfile._get_candidate_names()\n\
         uuid.uuid1()\n\
         def handler(event, context):\n\
         \x20   return {\n\
         \x20       'pid': os.getpid(),\n\
         \x20       'random': random.random() == random.Random(7).random(),\n\
         \x20       'gauss': random.gauss(0, 1) == random.Random(7).gauss(0, 1),\n\
         \x20       'node': uuid.uuid1().node == node or uuid.getnode() == node,\n\
         \x20       'multicast': uuid.uuid1().node >> 40 & 1,\n\
         \x20       'names': tempfile._get_candidate_names() is names,\n\
         \x20       'instance': os.environ['FIRN_INSTANCE_ID'],\n\
         \x20   }\n",
    );
    host.identify(1);
    let before = host.answer(&json!(1));
    ready_to_freeze(&host.ask(&Request::PrepareFreeze));
    let mut host = guest.connect();
    host.identify(2);
    let after = host.answer(&json!(1));
    let expected = |instance: &str| {
        json!({
            "pid": before["pid"], "random": false, "gauss": false, "node": false,
            "multicast": 1, "names": false, "instance": instance,
        })
    };
    assert_eq!(before, expected("i-1"));
    assert_eq!(after, expected("i-2"), "the same process with another identity");
}

#[test]
fn runtime_that_cannot_get_its_identity_is_replaced() {
    let (guest, mut host) = TestGuest::with(
        "import os\n\
         def handler(event, context):\n\
         \x20   if event: os.environ = None\n\
         \x20   return [os.getpid(), os.environ is None]\n",
    );
    let before = host.answer(&json!(true));
    ready_to_freeze(&host.ask(&Request::PrepareFreeze));
    let mut host = guest.connect();
    host.identify(2);
    let after = host.answer(&json!(false));
    assert_ne!(before[0], after[0]);
    assert_eq!(after[1], json!(false));
}

#[test]
fn runtime_that_does_not_reseed_in_time_fails_the_clone() {
    let (guest, mut host) = TestGuest::with(
        "import random, time\n\
         class Slow(random.Random):\n\
         \x20   sets = -9\n\
         \x20   def __setattr__(self, name, value):\n\
         \x20       self.__dict__['sets'] = self.sets + 1\n\
         \x20       if self.sets == 2: time.sleep(1000)\n\
         random._inst = Slow()\n\
         random._inst.__dict__['sets'] = 0\n\
         def handler(event, context): return 1\n",
    );
    ready_to_freeze(&host.ask(&Request::PrepareFreeze));
    let mut host = guest.connect();
    match host.ask(&Request::Identify(identity(2))) {
        Reply::Failed(failed) => assert_eq!(failed.error.error_type, "Sandbox.Timedout"),
        other => panic!("{other:?}"),
    }
    let refusal = refused(host.ask_function(&json!(1)));
    assert_eq!(refusal.kind, RefusalKind::NotIdentified);
}

#[test]
fn identity_function_returns_the_identity() {
    let (_guest, mut host) = TestGuest::with(IDENTITY);
    let (one, other) = (host.answer(&json!(1)), host.answer(&json!(1)));
    assert_eq!(one["instance_id"], json!("i-1"));
    for random in ["urandom", "random", "uuid1", "uuid4", "temporary"] {
        assert_ne!(one[random], other[random], "{random}");
    }
}
