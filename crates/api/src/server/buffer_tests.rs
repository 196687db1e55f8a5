use super::*;

#[tokio::test]
async fn a_full_buffer_refuses_and_recovers() {
    let buffer = Buffer::new(10);
    let first = buffer.hold(None);
    first.grow(6).await.unwrap();
    let second = buffer.hold(None);
    assert_eq!(second.grow(5).await, Err(Full));
    second.grow(4).await.unwrap();
    drop(first);
    second.grow(6).await.unwrap();
    assert_eq!(buffer.hold(None).grow(1).await, Err(Full));
}
