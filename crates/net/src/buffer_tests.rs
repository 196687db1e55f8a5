use std::collections::VecDeque;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use proptest::collection::vec;
use proptest::prelude::*;

use super::{CHUNK, FLOW_LIMIT, Pool, Queue, TOTAL_LIMIT, share};

/// What is done to a queue.
#[derive(Clone, Debug)]
enum Step {
    Push(usize),
    Consume(usize),
    Read(usize, usize),
    Write,
}

fn step() -> impl Strategy<Value = Step> {
    let len = 0..3 * CHUNK;
    prop_oneof![
        len.clone().prop_map(Step::Push),
        len.clone().prop_map(Step::Consume),
        (1..3 * CHUNK, len).prop_map(|(most, given)| Step::Read(most, given)),
        Just(Step::Write),
    ]
}

proptest! {
    #[test]
    fn a_queue_keeps_bytes_in_order(steps in vec(step(), 1..40)) {
        let (mut pool, mut queue) = (Pool::default(), Queue::default());
        let mut model = VecDeque::new();
        let mut numbers = (0_u32..).map(|n| n.to_le_bytes()[0] ^ n.to_le_bytes()[1]);
        let (mut near, mut far) = UnixStream::pair().unwrap();
        for end in [&near, &far] {
            end.set_nonblocking(true).unwrap();
        }
        for step in steps {
            match step {
                Step::Push(len) => {
                    let bytes: Vec<u8> = numbers.by_ref().take(len).collect();
                    queue.push(&bytes, &mut pool);
                    model.extend(bytes);
                }
                Step::Consume(len) => {
                    let len = len.min(queue.len());
                    queue.consume(len, &mut pool);
                    model.drain(..len);
                }
                Step::Read(most, given) => {
                    let bytes: Vec<u8> = numbers.by_ref().take(given).collect();
                    far.write_all(&bytes).unwrap();
                    let read = queue.read_from(&near, most, &mut pool).unwrap_or(0);
                    prop_assert_eq!(read, most.min(given));
                    model.extend(&bytes[..read]);
                    let _ = near.read(&mut vec![0; given]);
                }
                Step::Write => {
                    let written = queue.write_to(&near, &mut pool).unwrap();
                    let mut bytes = vec![0; written];
                    far.read_exact(&mut bytes).unwrap();
                    prop_assert!(model.drain(..written).eq(bytes));
                }
            }
            prop_assert_eq!(queue.len(), model.len());
            let offset = model.len() / 3;
            let mut rest = vec![0; model.len() - offset];
            queue.copy_to(offset, &mut rest);
            prop_assert!(model.iter().skip(offset).eq(&rest));
            // A chunk at each end may be used in part.
            prop_assert!(pool.usage().0 <= queue.len() + 2 * CHUNK);
        }
        queue.clear(&mut pool);
        prop_assert_eq!(pool.usage().0, 0);
    }
}

#[test]
fn a_share_shrinks_with_what_is_left_and_never_vanishes() {
    assert_eq!(share(0), FLOW_LIMIT);
    assert_eq!(share(TOTAL_LIMIT - 8 * 100_000), 100_000);
    assert_eq!(share(TOTAL_LIMIT), CHUNK);
    assert_eq!(share(usize::MAX), CHUNK);
}
