use super::*;
use crate::functions::testing::version;

#[test]
fn a_function_and_its_layers_have_a_limit_together() {
    let mut version = version();
    let half = MAX_UNPACKED / 2;
    version.code.content = half;
    let code = Code { content: half, unpacked: 1 << 30, ..version.code.clone() };
    version.layers.push(UsedLayer { layer: "l".into(), version: 1, code });
    check_content(&version).unwrap();
    version.code.content += 1;
    let error = check_content(&version).unwrap_err();
    assert!(
        matches!(error, ConfigurationError::TooLarge(size) if size == MAX_UNPACKED + 1),
        "{error:?}"
    );
}
