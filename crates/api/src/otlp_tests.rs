use super::*;

#[test]
fn an_invalid_endpoint_is_refused() {
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let _entered = runtime.enter();
    let error = exporter("not a url").unwrap_err();
    assert!(error.to_string().contains("http://127.0.0.1:4318"), "{error}");
}
