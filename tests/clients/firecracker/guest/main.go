// The program in the guests of the tests of Firecracker's clients. On vsock port 8000 it serves
// HTTP: POST /ping multiplies two numbers, and POST /run executes a shell script. On port 9000 it
// serves the gRPC service of fctools' tests.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os/exec"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/encoding/protowire"
)

func main() {
	http.HandleFunc("POST /ping", ping)
	http.HandleFunc("POST /run", run)
	go serveHTTP(listen(8000))

	server := grpc.NewServer(grpc.ForceServerCodec(codec{}))
	server.RegisterService(&service, nil)
	log.Fatal(server.Serve(listen(9000)))
}

// listen accepts connections to any context id, because a snapshot may be loaded with another one.
func listen(port uint32) net.Listener {
	listener, err := vsock.ListenContextID(unix.VMADDR_CID_ANY, port, nil)
	if err != nil {
		log.Fatalf("cannot listen on vsock port %d: %v", port, err)
	}
	return listener
}

func serveHTTP(listener net.Listener) {
	for {
		connection, err := listener.Accept()
		if err != nil {
			log.Fatal(err)
		}
		go answer(connection)
	}
}

// answer answers the requests of a connection. http.Serve refuses those without a Host, which a
// client of fctools sends.
func answer(connection net.Conn) {
	defer connection.Close()
	reader := bufio.NewReader(connection)
	for {
		request, err := http.ReadRequest(reader)
		if err != nil {
			return
		}
		recorder := httptest.NewRecorder()
		http.DefaultServeMux.ServeHTTP(recorder, request)
		io.Copy(io.Discard, request.Body)
		response := recorder.Result()
		response.ContentLength = int64(recorder.Body.Len())
		response.Close = request.Close
		if response.Write(connection) != nil || request.Close {
			return
		}
	}
}

func ping(response http.ResponseWriter, request *http.Request) {
	var body struct{ A, B uint32 }
	if err := json.NewDecoder(request.Body).Decode(&body); err != nil {
		http.Error(response, err.Error(), http.StatusBadRequest)
		return
	}
	response.Header().Set("Content-Type", "application/json")
	fmt.Fprintf(response, `{"c":%d}`, body.A*body.B)
}

func run(response http.ResponseWriter, request *http.Request) {
	script, err := io.ReadAll(request.Body)
	if err != nil {
		http.Error(response, err.Error(), http.StatusBadRequest)
		return
	}
	output, err := exec.Command("/bin/sh", "-c", string(script)).CombinedOutput()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		http.Error(response, err.Error(), http.StatusInternalServerError)
		return
	}
	code := 0
	if exit != nil {
		code = exit.ExitCode()
	}
	response.Header().Set("Exit-Code", fmt.Sprint(code))
	response.Write(output)
}

// number is the service's only message, under two names: uint32 number = 1.
type number struct{ value uint32 }

// codec encodes number.
type codec struct{}

func (codec) Name() string { return "proto" }

func (codec) Marshal(message any) ([]byte, error) {
	bytes := protowire.AppendTag(nil, 1, protowire.VarintType)
	return protowire.AppendVarint(bytes, uint64(message.(*number).value)), nil
}

func (codec) Unmarshal(bytes []byte, message any) error {
	// A number of 0 is absent.
	message.(*number).value = 0
	for len(bytes) > 0 {
		field, kind, length := protowire.ConsumeTag(bytes)
		if length < 0 {
			return protowire.ParseError(length)
		}
		if field != 1 || kind != protowire.VarintType {
			return fmt.Errorf("unknown field %d", field)
		}
		value, size := protowire.ConsumeVarint(bytes[length:])
		if size < 0 {
			return protowire.ParseError(size)
		}
		if value > math.MaxUint32 {
			return fmt.Errorf("%d is no uint32", value)
		}
		message.(*number).value = uint32(value)
		bytes = bytes[length+size:]
	}
	return nil
}

// On the wire a unary call is a stream of one message in each direction.
var service = grpc.ServiceDesc{
	ServiceName: "guest_agent.GuestAgentService",
	Streams: []grpc.StreamDesc{
		{StreamName: "Unary", Handler: square, ClientStreams: true, ServerStreams: true},
		{StreamName: "ClientStreaming", Handler: product, ClientStreams: true, ServerStreams: true},
		{StreamName: "ServerStreaming", Handler: repeat, ClientStreams: true, ServerStreams: true},
		{StreamName: "DuplexStreaming", Handler: echo, ClientStreams: true, ServerStreams: true},
	},
}

func square(_ any, stream grpc.ServerStream) error {
	var ping number
	if err := stream.RecvMsg(&ping); err != nil {
		return err
	}
	return stream.SendMsg(&number{ping.value * ping.value})
}

func product(_ any, stream grpc.ServerStream) error {
	pong := number{1}
	for {
		var ping number
		err := stream.RecvMsg(&ping)
		if err == io.EOF {
			return stream.SendMsg(&pong)
		} else if err != nil {
			return err
		}
		pong.value *= ping.value
	}
}

func repeat(_ any, stream grpc.ServerStream) error {
	var ping number
	if err := stream.RecvMsg(&ping); err != nil {
		return err
	}
	for range ping.value {
		if err := stream.SendMsg(&ping); err != nil {
			return err
		}
	}
	return nil
}

func echo(_ any, stream grpc.ServerStream) error {
	for {
		var ping number
		err := stream.RecvMsg(&ping)
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
		if err := stream.SendMsg(&ping); err != nil {
			return err
		}
	}
}
