use super::*;

#[test]
fn a_token_ends() {
    let tokens = Tokens::new().unwrap();
    let now = Instant::now();
    let token = tokens.issue(2, now);
    let after = |ms| now + Duration::from_millis(ms);
    assert!(tokens.is_valid(token.as_bytes(), now));
    assert!(tokens.is_valid(token.as_bytes(), after(1999)));
    assert!(!tokens.is_valid(token.as_bytes(), after(2001)));
}

#[test]
fn a_token_is_of_one_service() {
    let (tokens, others) = (Tokens::new().unwrap(), Tokens::new().unwrap());
    let now = Instant::now();
    let token = tokens.issue(60, now);
    assert!(!others.is_valid(token.as_bytes(), now));
}

#[test]
fn a_token_that_was_changed_is_not_valid() {
    let tokens = Tokens::new().unwrap();
    let now = Instant::now();
    let token = URL_SAFE_NO_PAD.decode(tokens.issue(60, now)).unwrap();
    for bit in 0..token.len() * 8 {
        let mut changed = token.clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        assert!(!tokens.is_valid(URL_SAFE_NO_PAD.encode(changed).as_bytes(), now), "bit {bit}");
    }
    for len in 0..token.len() {
        assert!(!tokens.is_valid(URL_SAFE_NO_PAD.encode(&token[..len]).as_bytes(), now));
    }
    let longer = [&token[..], &[0]].concat();
    assert!(!tokens.is_valid(URL_SAFE_NO_PAD.encode(longer).as_bytes(), now));
    assert!(!tokens.is_valid(b"not base64!", now));
}
